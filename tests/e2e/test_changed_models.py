"""Models that change after they were planned: planned anew, and the numbers of plain Keras."""

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tfpar.planning.intra_op import TapPlanner
from tfpar.spec import PlanError, Shard
from tfpar.tf.keras import parallel_model

rng = np.random.default_rng(0)
X = rng.normal(size=(16, 6)).astype("float32")
COLUMNS = [tap.shard("a/kernel", dim=1, axis="model")]


def build():
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "relu", name="a"), layers.Dense(3, name="b")],
        name="net",
    )
    model.compile("adam", "mse", jit_compile=False)
    return model


def lora(model):
    model.layers[0].enable_lora(2)
    model.compile("adam", "mse", jit_compile=False)


def added(model):
    model.add(layers.Dense(5, name="c"))
    model.compile("adam", "mse", jit_compile=False)


def popped(model):
    model.pop()
    model.add(layers.Dense(2, name="b"))  # the same name, another shape
    model.compile("adam", "mse", jit_compile=False)


def frozen(model):
    model.layers[0].trainable = False
    model.compile("adam", "mse", jit_compile=False)


def recompiled(model):
    model.compile("sgd", "mae", metrics=["mse"], jit_compile=False)


def reactivated(model):
    model.layers[0].activation = keras.activations.gelu
    model.compile("adam", "mse", jit_compile=False)


def trained(model, change):
    """The model trained, changed and trained again; the losses of both."""
    losses, eagerly = [], model.run_eagerly
    for seed, act in ((1, None), (2, change)):
        keras.utils.set_random_seed(seed)
        if act is not None:
            act(model)
        model.run_eagerly = eagerly
        y = X[:, : model.output_shape[-1]]
        losses += model.fit(X, y, batch_size=8, shuffle=False, verbose=0).history["loss"]
    return losses


def placement(weight):
    mesh, spec = weight.value.layout
    return spec[mesh.axis("model")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        *(pytest.param(c, marks=pytest.mark.slow) for c in (lora, popped)),
        *(nightly(c) for c in (added, frozen)),
        recompiled,
        nightly(reactivated),
    ],
)
def test_a_changed_model_is_planned_anew_and_stays_split(change, capsys):
    keras.utils.set_random_seed(0)
    with tap.auto_parallel(tap.split([2, 2]), COLUMNS, planner="tap"):
        model = build()
    keras.utils.set_random_seed(0)
    plain = build()
    plain.run_eagerly = True
    np.testing.assert_allclose(trained(model, change), trained(plain, change), rtol=1e-4)
    for got, want in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-5)
    assert placement(model.layers[0]._kernel) == Shard(1)
    told = capsys.readouterr().out.splitlines()
    assert sum("planned anew" in line for line in told) == 1
    assert set(parallel_model(model).plan.variables) >= {w.path for w in model.weights}


@pytest.mark.slow
def test_a_quantized_model_predicts_as_one_device_does():
    keras.utils.set_random_seed(0)
    with tap.auto_parallel(tap.split([2, 2]), COLUMNS, planner="tap"):
        model = build()
    plain = build()
    plain.set_weights(model.get_weights())
    for each in (model, plain):
        each.predict(X, verbose=0)
        for layer in each.layers:
            layer.quantize("int8")
        each.predict_function = None
    np.testing.assert_allclose(
        model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-4, atol=1e-5
    )


class OnlyAnew(TapPlanner):
    """Finds no plan in which anything lies already."""

    refused = 0

    def solve(self, problem):
        if problem.given.variables:
            self.refused += 1
            raise PlanError("It cannot stay.")
        return super().solve(problem)


@pytest.mark.slow
def test_what_cannot_stay_where_it_lies_is_laid_anew():
    planner = OnlyAnew()
    with tap.auto_parallel(tap.split([2]), planner=planner):
        model = build()
    model.fit(X, X[:, :3], batch_size=8, verbose=0)
    added(model)
    model.fit(X, X[:, :5], batch_size=8, verbose=0)
    assert planner.refused == 1
    assert "net/c/kernel" in tap.plan_of(model).variables


@pytest.mark.slow
def test_a_given_plan_is_not_replaced(tmp_path):
    with tap.auto_parallel(tap.split([2, 2]), COLUMNS, planner=None):
        model = build()
    model.fit(X, X[:, :3], batch_size=8, verbose=0)
    tap.plan_of(model).save(tmp_path / "plan.json")
    with tap.auto_parallel(plan=str(tmp_path / "plan.json")):
        given = build()
    given.fit(X, X[:, :3], batch_size=8, verbose=0)
    added(given)
    with pytest.raises(PlanError, match="another model.*'net/c/bias'"):
        given.fit(X, X[:, :5], batch_size=8, verbose=0)
