"""A checkpoint of another model: refused before anything is assigned, by all that differs."""

import json
import os

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tfpar.spec import TfparError

X, Y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


def model_of(*middle, optimizer="sgd", metrics=(), units=2, trained=False):
    """A model of layers in the middle and a head, in one block of ranks."""
    keras.utils.clear_session(free_memory=False)
    with tap.auto_parallel(2, planner=None, verbose=0):
        stack = [keras.Input((3,)), *(make() for make in middle), layers.Dense(units, name="head")]
        model = keras.Sequential(stack, name="m")
        if optimizer is not None:
            model.compile(optimizer, "mse", metrics=list(metrics), jit_compile=False)
    if trained:
        model.train_on_batch(X, Y)
    return model


def hidden(units=3, name="a"):
    return lambda: layers.Dense(units, name=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of layers a and head, with momentum and a metric."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, name="sgd")
    model = model_of(hidden(), optimizer=optimizer, metrics=["mae"], trained=True)
    return tap.save_checkpoint(model, tmp_path_factory.mktemp("run"))


def refused(model, path):
    """The message, once it is sure that nothing was restored."""
    before = [np.array(v) for v in model.variables]
    with pytest.raises(TfparError, match=f"^The checkpoint {path} is not of model 'm'") as error:
        tap.restore_checkpoint(model, path)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.variables, strict=True))
    return str(error.value)


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9, name="sgd")


def test_what_differs_is_named_together(saved):
    said = refused(model_of(hidden(5), hidden(name="b"), optimizer="adam"), saved)
    assert "it was saved with the optimizer SGD, and the model has Adam" in said
    assert "it has no 'm/b/kernel', 'm/b/bias'" in said
    assert "'m/a/kernel' is float32 (3, 3) there and float32 (3, 5) in the model" in said
    assert "momentum" not in said and "adam/" not in said, "which follows from the optimizer"
    assert "Nothing was restored" in said and "the model has no" not in said


def test_weights_that_only_the_checkpoint_has_are_named(saved):
    said = refused(model_of(optimizer=momentum(), metrics=["mae"]), saved)
    assert "the model has no 'm/a/bias', 'm/a/kernel'" in said


def test_slots_of_the_same_optimizer_that_are_not_needed_are_named(saved):
    plain = keras.optimizers.SGD(0.1, name="sgd")
    said = refused(model_of(hidden(), optimizer=plain, metrics=["mae"]), saved)
    assert "the model has no 'sgd/m_a_bias_momentum'" in said and "was saved with" not in said


def test_another_type_is_named(saved):
    def half():
        return layers.Dense(3, name="a", dtype="float16")

    said = refused(model_of(half, optimizer=momentum(), metrics=["mae"]), saved)
    assert "'m/a/kernel' is float32 (3, 3) there and float16 (3, 3) in the model" in said
    assert "dtype policy" in said


def test_what_a_model_needs_none_of_may_be_left(saved):
    """An optimizer where the model has none, and metrics."""
    model = model_of(hidden(), optimizer=None)
    assert tap.restore_checkpoint(model, saved).step == 1
    trained = model_of(hidden(), optimizer=momentum())
    assert tap.restore_checkpoint(trained, saved).step == 1
    for one, other in zip(model.weights, trained.weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_of_checkpoints_of_format_1_it_is_said_what_was_left(saved, caplog):
    file = os.path.join(saved, "checkpoint.json")
    with open(file) as opened:
        whole = opened.read()
    old = json.loads(whole) | {"format": 1}
    del old["checksum"], old["info"]["model"]
    with open(file, "w") as opened:
        json.dump(old, opened)
    try:
        tap.restore_checkpoint(model_of(hidden(), optimizer=momentum()), saved)
        assert "'mean_absolute_error/total', which the model has not" in caplog.text
        assert "it has no 'm/b/kernel'" in refused(
            model_of(hidden(name="b"), hidden(), optimizer=momentum()), saved
        )
    finally:
        with open(file, "w") as opened:
            opened.write(whole)
