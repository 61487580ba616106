"""Gradients that travel in half precision, while all else stays what it is."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.cases import nightly
from tests.e2e.features import f, perceptron
from tfpar.spec import TfparError
from tfpar.tf.keras import parallel_model

DATA = f(16, 6), f(16, 2)
ZERO_1 = [tap.batch("data"), tap.shard(".*fc1_kernel_(momentum|velocity)", dim=0, axis="data")]


def trained(constraints=(), optimizer="sgd", **options) -> keras.Model:
    """A perceptron after some steps on two ranks; on one device without options."""
    keras.utils.set_random_seed(3)
    model = perceptron(optimizer)
    model.run_eagerly = not options
    if options:
        tap.parallelize(model, [2], constraints, planner=None, **options)
    model.fit(*DATA, batch_size=8, shuffle=False, epochs=2, verbose=0)
    return model


def moved(model: keras.Model) -> list[tuple[str, int]]:
    """Kind and bytes of each collective of a step."""
    step = parallel_model(model).executables["train"]
    return sorted((kind, size) for kind, _, size in step.partitioned.collectives())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rtol"), [("fp16", 2e-3), nightly("bf16", 2e-2)])
def test_trains_nearly_as_without(name, rtol):
    plain, compressed = trained(), trained(compression=name)
    for got, wanted in zip(compressed.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol, rtol)
        assert not np.array_equal(got, wanted)
        assert got.dtype == np.float32


@pytest.mark.slow
def test_only_gradients_travel_as_halves():
    compressed = trained(compression="bf16")
    whole, halves = moved(trained(strict=True)), moved(compressed)
    gradients = sum(4 * w.shape.num_elements() for w in perceptron("sgd").trainable_weights)
    others = sum(size for _, size in whole) - gradients  # the loss
    assert others > 0 and sum(size for _, size in halves) == pytest.approx(gradients / 2 + others)
    step = parallel_model(compressed).executables["train"]
    assert sum(step.packed_bytes) == pytest.approx(gradients / 2 + others)


@pytest.mark.slow
def test_sharded_slots_get_halves_and_give_whole_weights():
    whole = moved(trained(ZERO_1, "adam", strict=True))
    halves = moved(trained(ZERO_1, "adam", compression="fp16"))
    (scattered,) = (size for kind, size in whole if kind == "reduce_scatter")
    assert ("reduce_scatter", scattered / 2) in halves
    gathered = [pair for pair in whole if pair[0] == "all_gather"]
    assert gathered == [pair for pair in halves if pair[0] == "all_gather"]


def test_plans_are_priced_with_it():
    def build():
        inputs = keras.Input((1024,))
        model = keras.Model(inputs, keras.layers.Dense(1024)(inputs))
        model.compile("sgd", "mse")
        return model

    batch = np.zeros((8, 1024), "float32"), np.zeros((8, 1024), "float32")
    constraints = [tap.batch("data"), tap.replicate(".*")]
    costs = [
        tap.plan(
            build, batch, [4], "v100-ethernet", constraints, planner="tap", compression=compression
        ).cost  # Rhino's planner gathers what the gradients are made of: that is less
        for compression in (None, "fp16")
    ]
    plain, halves = (cost.gradients_s for cost in costs)
    assert halves < 0.75 * plain  # what is left is what starting takes


def test_an_unknown_name_says_which_there_are():
    with pytest.raises(TfparError, match="compression is 'int8'; it must be one of 'fp16', 'bf16'"):
        tap.auto_parallel([2], compression="int8")
