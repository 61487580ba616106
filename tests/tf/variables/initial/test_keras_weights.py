"""Weights streamed into Keras models are those that Keras loads."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.saving import saving_lib

import tfpar as tap
from tfpar.spec import Mesh, Shard
from tfpar.tf.keras.streamed_weights import streamed_weights
from tfpar.tf.variables.initial.shard_source import StoredValue
from tfpar.tf.variables.parallel_variable import ParallelVariable

FORMATS = ("model.weights.h5", "model.keras", "model.weights.json")


def build(dtype="float32"):
    model = keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(16, activation="relu", dtype=dtype),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(4, dtype=dtype),
        ]
    )
    model.compile("adam", "mse", jit_compile=False)
    return model


def build_pending(**options):
    with tap.auto_parallel(tap.split([2])):
        return build(**options)


def save(model, path):
    if path.suffix == ".keras":
        model.save(path)
    elif path.suffix == ".json":
        model.save_weights(path, max_shard_size=800 / 2**30)
    else:
        model.save_weights(path)


@pytest.fixture
def taken(monkeypatch):
    """The stored values that variables were given."""
    values: list[tuple[ParallelVariable, StoredValue]] = []

    def assign_stored(self, value):
        values.append((self, value))
        self.assign(value())

    monkeypatch.setattr(ParallelVariable, "assign_stored", assign_stored, raising=False)
    return values


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_tfpar_loads_what_keras_loads(tmp_path, taken, name, dtype):
    path = tmp_path / name
    source = build(dtype)
    save(source, path)
    model = build_pending(dtype=dtype)
    with streamed_weights(small_bytes=100):
        model.load_weights(path)
    assert len(taken) == 2  # the kernels: the rest is small
    for got, want in zip(model.get_weights(), source.get_weights(), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    for (_, value), weight in zip(taken, (source.weights[0], source.weights[-2]), strict=True):
        shard = value.read_shard((Shard(1),), Mesh.of([2]), 1)
        np.testing.assert_array_equal(shard, np.split(weight.numpy(), 2, axis=1)[1])


def test_plain_variables_get_arrays(tmp_path, taken):
    path = tmp_path / "model.weights.h5"
    source, model = build(), build()
    source.save_weights(path)
    with streamed_weights(small_bytes=0):
        model.load_weights(path)
    assert not taken
    for got, want in zip(model.get_weights(), source.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


def test_stored_as_another_dtype(tmp_path, taken):
    path = tmp_path / "model.weights.h5"
    source = build()
    source.save_weights(path)
    model, plain = build_pending(dtype="bfloat16"), build("bfloat16")
    plain.load_weights(path)
    with streamed_weights(small_bytes=100):
        model.load_weights(path)
    kernels = plain.weights[0], plain.weights[-2]
    for (variable, value), weight in zip(taken, kernels, strict=True):
        assert tf.as_dtype(value.dtype) == variable.dtype
        np.testing.assert_array_equal(value(), weight.numpy())


def test_whoever_loads_weights_streams_them(tmp_path, taken):
    """As KerasHub does for what a task has beside its backbone, and for the backbone."""
    path = str(tmp_path / "model.weights.h5")
    source = keras.Sequential([keras.Input((512,)), keras.layers.Dense(600)])  # more than a MiB
    source.save_weights(path)
    with tap.auto_parallel(tap.split([2])):
        model = keras.models.clone_model(source)
    model.load_weights(path)
    keras.saving.load_weights(model, path)
    keras.saving.load_weights(keras.models.clone_model(source), path)  # which is no model of tfpar
    assert [variable for variable, _ in taken] == [model.weights[0].value] * 2
    np.testing.assert_array_equal(model.weights[0], source.weights[0])


@pytest.mark.slow
def test_a_saved_model_is_loaded_with_its_optimizer(tmp_path, taken):
    path = tmp_path / "model.keras"
    source = build()
    source.fit(np.ones((8, 12)), np.ones((8, 4)), verbose=0)
    source.save(path)
    with tap.auto_parallel(tap.split([2])), streamed_weights(small_bytes=100):
        model = keras.models.load_model(path)
    assert len(taken) == 6  # two kernels, and momentum and velocity of each
    assert not list(tmp_path.glob("tmp*")), "the archive was extracted"
    for got, want in zip(model.optimizer.variables, source.optimizer.variables, strict=True):
        np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_another_architecture_is_named(tmp_path, taken):
    path = tmp_path / "model.weights.h5"
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(9)]).save_weights(path)
    with tap.auto_parallel(tap.split([2])):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, name="wide")])
    with streamed_weights(small_bytes=0), pytest.raises(ValueError, match=r"\(3, 9\).*wide"):
        model.load_weights(path)


def test_keras_is_left_as_it_was():
    names = [
        (saving_lib.H5IOStore, "__getitem__"),
        (saving_lib.H5IOStore, "_get_h5_file"),
        (saving_lib, "is_memory_sufficient"),
        (keras.Variable, "assign"),
    ]
    before = [getattr(owner, name) for owner, name in names]
    inherited = "assign" not in vars(keras.Variable)
    with pytest.raises(RuntimeError, match="stop"), streamed_weights():
        raise RuntimeError("stop")
    assert [getattr(owner, name) for owner, name in names] == before
    assert ("assign" not in vars(keras.Variable)) == inherited
