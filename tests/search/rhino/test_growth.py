"""Candidates: strides where they save communication, and only there."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from benchmarks.models import compile_model
from tests.clusters import device, two_levels
from tests.search.problems import Captured, price
from tfpar.cluster.network import Link
from tfpar.search.rhino import RhinoPlanner
from tfpar.spec import Shard

# Slow devices on fast links: whatever splits work pays.
COMPUTE_BOUND = two_levels(
    "compute", 1, 4, device(1e8, 1e8, 1e12, 1e9, 0.0), Link(1e12, 1e-9), Link(1e12, 1e-9)
)


def fused_attention(length=16, hidden=64, heads=8):
    """One sequence, Q, K and V projected by one kernel."""
    inputs = keras.Input((length, hidden))
    fused = layers.Dense(3 * hidden, use_bias=False, name="qkv")(inputs)
    fused = ops.reshape(fused, (-1, length, 3, heads, hidden // heads))
    query, key, value = (ops.transpose(fused[:, :, i], (0, 2, 1, 3)) for i in range(3))
    scores = ops.softmax(ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))))
    mixed = ops.transpose(ops.matmul(scores, value), (0, 2, 1, 3))
    out = layers.Dense(hidden, name="out")(ops.reshape(mixed, (-1, length, hidden)))
    return compile_model(keras.Model(inputs, layers.Dense(10, name="head")(out[:, 0])))


@pytest.mark.slow
@pytest.mark.parametrize("level", [2, 3])
def test_a_fused_projection_is_split_by_heads(level):
    data = np.zeros((1, 16, 64), "float32"), np.zeros(1, "int32")
    problem = Captured.of(fused_attention, 1, data).problem([1, 4], COMPUTE_BOUND)
    plan = RhinoPlanner(level=level).solve(problem)
    (split, *_) = plan.variables["qkv/kernel"].spec
    assert isinstance(split, Shard)
    # Within each of Q, K and V, which are 64 columns: blocks of a part would cut across them.
    assert (split.dim, split.stride) == (1, 64)
    assert price(problem, plan).seconds == pytest.approx(plan.cost.seconds, rel=1e-4)
    others = [v.spec for n, v in plan.variables.items() if v.spec and n != "qkv/kernel"]
    assert all(p.stride is None for spec in others for p in spec if isinstance(p, Shard))
