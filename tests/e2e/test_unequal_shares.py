"""Data parallelism over ranks of unequal speed: shares of the batch differ, numbers do not."""

from __future__ import annotations

import dataclasses
import logging

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.equivalence import assert_equivalent
from tfpar.cluster import Cluster, Device, Level, Node
from tfpar.tf.keras import parallel_model

FAST = Device({"float32": 3e9}, 2**34, 3e8, name="fast")
SLOW = dataclasses.replace(FAST, flops={"float32": 1e9}, memory_bandwidth=1e8, name="slow")
DATA_PARALLEL = [tap.batch("data"), tap.replicate(".*")]


def cluster(*devices: Device) -> Cluster:
    return Cluster("unequal", tuple(map(Node, devices)), (Level(len(devices), 1e9, 1e-7),))


def mlp() -> keras.Model:
    inputs = keras.Input((6,))
    h = layers.Dense(24, "relu")(inputs)
    h = layers.BatchNormalization()(h)
    h = layers.Dropout(0.3, seed=3)(h)
    model = keras.Model(inputs, layers.Dense(2)(h))
    model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"], jit_compile=False)
    return model


def attention() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(11, 8)(inputs)
    x = layers.MultiHeadAttention(2, 4, dropout=0.1, seed=5)(x, x) + x
    x = layers.Dense(16, "gelu", name="wide")(layers.LayerNormalization()(x))
    model = keras.Model(inputs, layers.Dense(11)(layers.LSTM(8)(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    return model


def regression(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    x, y, weights = rng.normal(size=(n, 6)), rng.normal(size=(n, 2)), rng.uniform(0.1, 2, n)
    return tuple(a.astype("float32") for a in (x, y, weights))


def tokens(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.integers(0, 11, (n, 6)), rng.integers(0, 11, n)


def shares(model: keras.Model) -> dict[str, tuple[int, ...] | None]:
    """In the last program of each kind; None: they are equal."""
    executables = parallel_model(model).executables
    return {kind: getattr(e.local.mesh, "shares", None) for kind, e in executables.items()}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [nightly((FAST, SLOW)), (SLOW, FAST, FAST, SLOW)])
def test_ranks_three_times_as_fast_train_as_one_device(devices):
    """22 samples: a batch of 16, and one of 6; all are shared out, and no sample is padded."""
    machines, data = cluster(*devices), regression(22)
    parallel, plain = assert_equivalent(
        mlp,
        data,
        [len(devices)],
        DATA_PARALLEL,
        planner="tap",
        cluster=machines,
        batch_size=16,
        epochs=2,
    )
    one, model = plain.model, parallel.model
    plan = tap.plan_of(model)
    (planned,) = plan.shares.values()
    assert sum(planned) == 16 and max(planned) >= 2 * min(planned)
    assert [n == max(planned) for n in planned] == [d is FAST for d in devices]
    assert f"batch split over data in shares {':'.join(map(str, planned))}" in plan.summary()

    x, y, weights = data
    got, want = (
        m.evaluate(x, y, 14, sample_weight=weights, return_dict=True, verbose=0)
        for m in (model, one)
    )
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-5), name
    np.testing.assert_allclose(
        model.predict(x, 14, verbose=0), one.predict(x, 14, verbose=0), rtol=1e-4, atol=1e-5
    )
    last = {kind: sum(found) for kind, found in shares(model).items()}
    assert last == {"train": 6, "test": 8, "predict": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes, counts", [nightly(("data",), (12, 4)), (("data", "model"), (10, 6))]
)
def test_shares_beside_another_axis(axes, counts):
    """The second axis splits a layer, or each share once more."""
    split = [tap.shard("wide/kernel", 1, "model")] if len(axes) == 1 else []
    laid = [tap.batch(*axes), *split]

    def trained(**options):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        with tap.auto_parallel(**options):
            model = attention()
        losses = model.fit(*tokens(16), 16, 2, verbose=0, shuffle=False).history["loss"]
        return model, losses, model.predict(tokens(16)[0], verbose=0)

    even, losses, predicted = trained(mesh=[2, 2], constraints=laid, planner=None)
    plan = dataclasses.replace(tap.plan_of(even), shares={"data": counts})
    uneven, same_losses, same = trained(plan=plan)
    assert shares(uneven)["train"] != shares(even)["train"] is None
    np.testing.assert_allclose(same_losses, losses, rtol=1e-5)
    np.testing.assert_allclose(same, predicted, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_ranks_that_are_alike_have_equal_shares():
    with tap.auto_parallel([2], DATA_PARALLEL, cluster=cluster(SLOW, SLOW), planner="tap"):
        model = mlp()
    model.fit(*regression(16)[:2], 16, verbose=0)
    assert not tap.plan_of(model).shares and shares(model) == {"train": None}


@pytest.mark.slow
def test_a_weight_that_the_axis_splits_keeps_shares_equal(caplog):
    """A plan that says otherwise is no error: numbers are those of one device."""
    laid = [tap.batch("data"), tap.shard("dense/kernel", 1, "data")]

    def trained(**options):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        with tap.auto_parallel(**options):
            model = mlp()
        return model, model.fit(*regression(16)[:2], 8, verbose=0, shuffle=False).history

    even, history = trained(mesh=[2], constraints=laid, planner=None)
    plan = dataclasses.replace(tap.plan_of(even), shares={"data": (6, 2)})
    with caplog.at_level(logging.WARNING, "tfpar"):
        model, same = trained(plan=plan)
    assert shares(model) == {"train": None} and same == history
    assert "does not split in the unequal shares" in caplog.text
    with pytest.raises(tap.TfparError, match="does not split in the unequal shares"):
        trained(plan=plan, strict=True)


@pytest.mark.slow
def test_a_saved_plan_keeps_its_shares(tmp_path):
    keras.utils.clear_session(free_memory=False)
    batch = regression(16)[:2]
    plan = tap.plan(mlp, batch, [2], cluster(FAST, SLOW), constraints=DATA_PARALLEL)
    assert plan.shares
    plan.save(tmp_path / "plan.json")
    keras.utils.clear_session(free_memory=False)
    with tap.auto_parallel(plan=tap.Plan.load(tmp_path / "plan.json")):
        model = mlp()
    model.fit(*batch, 16, verbose=0)
    assert {"data": shares(model)["train"]} == plan.shares
