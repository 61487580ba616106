"""ZeRO-1 as a search finds it where memory is short: the numbers of one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.cases import nightly
from tests.planning.test_slots import MACHINES
from tfpar.spec import Replicate


def build(optimizer):
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(256, "relu", name=f"dense_{i}") for i in range(4)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(8, name="head")])
    model.compile(optimizer(), "mse", jit_compile=False)
    return model


def data():
    rng = np.random.default_rng(0)
    return rng.random((2048, 64), "float32"), rng.random((2048, 8), "float32")


@pytest.fixture(scope="module", params=[nightly("AdamW"), "Adafactor"])
def optimizer(request):
    """Slots with the dims of their weights, and with fewer."""
    return lambda: getattr(keras.optimizers, request.param)(1e-3)


@pytest.fixture(scope="module")
def alone(optimizer):
    model = build(optimizer)
    history = model.fit(*data(), batch_size=1024, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"], model.get_weights()


def slots_of(plan):
    return [name for name, v in plan.variables.items() if v.slots is not None]


def is_matrix(variable):
    return variable.trainable and len(variable.shape) > 1


def trained(optimizer, pipeline, epochs):
    """A model whose fastest plan would not fit, its losses, and that plan."""
    asked = dict(cluster=MACHINES, pipeline=pipeline)
    batch = [part[:1024] for part in data()]
    free = tap.plan(lambda: build(optimizer), batch, [4], **asked)
    assert not slots_of(free)
    limit = free.cost.memory_bytes - free.cost.state_bytes / 4
    with tap.auto_parallel([4], memory_limit=limit, **asked):
        model = build(optimizer)
    history = model.fit(*data(), batch_size=1024, epochs=epochs, shuffle=False, verbose=0)
    assert tap.plan_of(model).cost.memory_bytes <= limit
    return model, history.history["loss"], free


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline", [nightly(tap.Pipeline(1, 1)), nightly(tap.Pipeline(1, 2)), tap.Pipeline(2, 2)]
)
def test_equals_one_device(optimizer, alone, pipeline):
    model, found, free = trained(optimizer, pipeline, 2)
    plan = tap.plan_of(model)
    split, matrices = {*slots_of(plan)}, {n for n, v in plan.variables.items() if is_matrix(v)}
    if plan.stages is not None:  # all those of each stage that would not fit
        stage_of = plan.stages.owners
        full = {stage_of[name] for name in split}
        matrices = {name for name in matrices if stage_of[name] in full}
    assert split == matrices and len(split) >= 3
    weights = {v.spec for v in plan.variables.values() if v.trainable and v.spec}
    assert weights == {(Replicate(), Replicate())}
    assert plan.cost.state_bytes < 0.7 * free.cost.state_bytes
    losses, values = alone
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for mine, theirs in zip(model.get_weights(), values, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_is_said_of_a_slot():
    model, _, _ = trained(keras.optimizers.Adam, tap.Pipeline(1, 1), 1)
    name = next(v.path for v in model.optimizer.variables if "dense_1_kernel_momentum" in v.path)
    text = tap.plan_of(model).explain(name)
    assert "(64, 256)" in text and "is split further than it, to store less" in text
