"""Ops that treat every element alike, each registered type by itself, on every element type."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import MESHES, check, run, sweep
from tests.rules.test_soundness_layout import f
from tfpar.rules import pointwise, registered_types
from tfpar.rules.registry import rule_function
from tfpar.spec import Replicate, Shard

rng = np.random.default_rng(0)
OPERANDS = {
    "float32": [rng.uniform(0.1, 0.9, (5, 4)).astype("float32") for _ in range(3)],
    "int32": [rng.integers(1, 7, (5, 4)).astype("int32") for _ in range(3)],
    "bool": [rng.integers(0, 2, (5, 4)).astype("bool") for _ in range(3)],
    "complex64": [(f(5, 4) + 1j * f(5, 4)).astype("complex64") for _ in range(3)],
}
BY_HAND = {
    "Bitcast": lambda x: tf.bitcast(x, tf.uint8),
    "Cast": lambda x: tf.raw_ops.Cast(x=x, DstT=tf.float16),
    "CheckNumerics": lambda x: tf.raw_ops.CheckNumerics(tensor=x, message=""),
    "CheckNumericsV2": lambda x: tf.raw_ops.CheckNumericsV2(tensor=x, message=""),
    "Select": lambda x: tf.raw_ops.Select(condition=x > 0.5, x=x, y=-x),
    "SelectV2": lambda x: tf.raw_ops.SelectV2(condition=x > 0.5, t=x, e=x[0]),
}


def elementwise_types() -> list[str]:
    home = pointwise.__name__
    return [t for t in registered_types() if rule_function(t).__module__ == home]


def call(op_type: str, values) -> list:
    """The raw op on `values`."""
    definition = getattr(tf.raw_ops, op_type)
    names = list(definition.__signature__.parameters)
    if op_type in ("AddN", "IdentityN"):
        return tf.nest.flatten(definition(**{names[0]: list(values)}))
    return tf.nest.flatten(definition(**dict(zip(names, values, strict=False))))


def arity(op_type: str, dtype: str) -> int | None:
    """How many operands of `dtype` the type takes; None where it has no kernel for them."""
    for count in (1, 2, 3):
        values = OPERANDS[dtype][:count]
        try:
            run(lambda *given: call(op_type, given), values, [(Replicate(),)] * count, MESHES[0])
        except (TypeError, ValueError, tf.errors.OpError):
            continue  # other operands, or no kernel
        return count
    return None


@functools.cache
def runnable(dtype: str) -> dict[str, int]:
    found = {t: arity(t, dtype) for t in elementwise_types() if t not in BY_HAND}
    return {op_type: count for op_type, count in found.items() if count}


def apply_all(counts: dict[str, int], *values) -> list:
    """Every op type of `counts` on the same operands, as many as it takes."""
    return [call(op_type, values[:count]) for op_type, count in counts.items()]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", OPERANDS)
def test_every_elementwise_type(dtype):
    sweep(
        functools.partial(apply_all, runnable(dtype)), OPERANDS[dtype], trials=2, meshes=MESHES[1:]
    )


@pytest.mark.slow
def test_no_elementwise_type_is_left_out():
    swept = set(BY_HAND).union(*(runnable(dtype) for dtype in OPERANDS))
    assert set(elementwise_types()) == swept


@pytest.mark.slow
@pytest.mark.parametrize("op_type", BY_HAND)
def test_types_with_attributes_of_their_own(op_type):
    sweep(BY_HAND[op_type], OPERANDS["float32"][:1], trials=3)


def test_elementwise_ops_stay_split():
    spec = (Shard(0), Shard(1))
    floats = OPERANDS["float32"]
    result = check(functools.partial(apply_all, runnable("float32")), floats, [spec] * 3, MESHES[2])
    # IdentityN is dissolved beforehand.
    for op_type in runnable("float32").keys() - {"IdentityN"}:
        splits = [decision.strategy.splits for decision in result.decisions(op_type)]
        assert any(all(factor >= 0 for factor, _ in split) for split in splits), op_type
