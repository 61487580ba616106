"""Candidates: strides where they save communication, and only there."""

import pytest

from tests.clusters import device, two_levels
from tests.planning.problems import Captured, price
from tfpar.cluster import Link
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.spec import Shard

# Slow devices on fast links: whatever splits work pays.
COMPUTE_BOUND = two_levels(
    "compute", 1, 4, device(1e8, 1e8, 1e12, 1e9, 0.0), Link(1e12, 1e-9), Link(1e12, 1e-9)
)


@pytest.mark.slow
@pytest.mark.parametrize("level", [2, 3])
def test_a_fused_projection_is_split_by_heads(level):
    problem = Captured.saved("fused_attention").problem([1, 4], COMPUTE_BOUND)
    plan = RhinoPlanner(level=level).solve(problem)
    (split, *_) = plan.variables["qkv/kernel"].spec
    assert isinstance(split, Shard)
    # Within each of Q, K and V, which are 64 columns: blocks of a part would cut across them.
    assert (split.dim, split.stride) == (1, 64)
    assert price(problem, plan).seconds == pytest.approx(plan.cost.seconds, rel=1e-4)
    others = [v.spec for n, v in plan.variables.items() if v.spec and n != "qkv/kernel"]
    assert all(p.stride is None for spec in others for p in spec if isinstance(p, Shard))
