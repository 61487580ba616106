"""A wrong rule of any family is found by `verify`, and nothing is found where all are right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from tests.equivalence import without_graph_optimizers
from tests.observability.verification.planted import COLUMNS, PLANTED, ROWS, Planted, Wrong
from tfpar.ir import Op
from tfpar.observability.verification import Verdict, Verification
from tfpar.rules import FAMILIES, register_rule, rule_function

rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, COLUMNS)).astype("float32")
Y = rng.normal(size=(ROWS, 1)).astype("float32")


class Probe(keras.layers.Layer):
    """Passes its input on; what a step computes of it ends in weights that are not trained."""

    def __init__(self, planted: Planted, name: str) -> None:
        super().__init__(name=name)
        self.step = planted.step

    def build(self, shape):
        self.seen = self.add_weight((), "zeros", trainable=False, name="seen")
        self.state = self.add_weight((COLUMNS,), "zeros", trainable=False, name="state")

    def call(self, x):
        y = self.step(x, self.state.value)
        places = np.arange(1, 1 + np.prod(y.shape)).reshape(y.shape).astype("float32")
        self.seen.assign(tf.reduce_sum(y * places))
        return x


def verified(*probes: Probe) -> Verification:
    keras.utils.set_random_seed(0)
    session = tap.auto_parallel([2], planner=None, attention="blockwise")
    with session, without_graph_optimizers():
        inputs = keras.Input(batch_shape=(ROWS, COLUMNS))
        x = inputs
        for probe in probes:
            x = probe(x)
        model = keras.Model(inputs, layers.Dense(1, name="head")(x))
        model.compile("adam", "mse", jit_compile=False)
        return tap.verify(model, X, Y, steps=1)


@contextlib.contextmanager
def planted_rule(
    op_type: str, plant: Wrong, only: Callable[[Op], bool] = lambda op: True
) -> Iterator[None]:
    """The rule of `op_type` is wrong inside, of those ops that `only` says."""
    right = rule_function(op_type)
    wrong = plant(right)
    register_rule(
        op_type, lambda op, constants: (wrong if only(op) else right)(op, constants), replace=True
    )
    try:
        yield
    finally:
        register_rule(op_type, right, replace=True)


def family_of(op_type: str) -> str:
    return rule_function(op_type).__module__.rpartition(".")[2]


def test_an_error_is_planted_in_every_family():
    assert {f.__name__.rpartition(".")[2] for f in FAMILIES} == set(PLANTED)
    assert {name: family_of(p.op_type) for name, p in PLANTED.items()} == {n: n for n in PLANTED}


@pytest.mark.slow
@pytest.mark.parametrize("family", PLANTED)
def test_a_wrong_rule_is_found(family):
    error = PLANTED[family]
    with planted_rule(error.op_type, error.plant):
        report = verified(Probe(error, family))
    assert not report.ok, str(report)
    wrong = {v.name for v in report.variables if v.verdict is Verdict.DIFFERS}
    assert wrong & {f"{family}/seen", f"{family}/state"}, str(report)


@pytest.mark.slow
def test_right_rules_pass():
    report = verified(*(Probe(p, name) for name, p in PLANTED.items()))
    assert report.ok, str(report)
