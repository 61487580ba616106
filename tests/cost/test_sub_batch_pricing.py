"""The terms of the parts of a step add up to those of the step."""

import random

import numpy as np
import pytest

import tfpar as tap
from tests.clusters import device, two_levels
from tests.plan.graphs import mlp, partition
from tfpar.cluster import Link
from tfpar.cost.evaluation import evaluate, terms_of
from tfpar.cost.pricer import Pricer
from tfpar.ir import Roles
from tfpar.plans import plan_from_constraints
from tfpar.spec import Mesh

# Times are sums of powers of two: they add up exactly, in whatever order.
DEVICE = device(2.0**30, 2.0**30, 2.0**30, 2.0**30, 2.0**-20)
LINK = Link(2.0**30, 2.0**-20)
CLUSTER = two_levels("exact", 2, 2, DEVICE, LINK, LINK)
LAYOUTS = {
    "data": (),
    "model": (tap.batch("data"), tap.shard(r"fc1/kernel", dim=1, axis="model")),
}


def laid(constraints):
    plan = plan_from_constraints(mlp(hidden=16, momentum=True), Mesh.of([2, 2]), constraints)
    partitioned = partition(mlp(hidden=16, momentum=True), plan)
    return partitioned, Pricer(partitioned.mesh, CLUSTER, Roles.of(partitioned.graph))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state_ratio", [None, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_parts_add_up_to_the_step(layout, state_ratio, seed):
    partitioned, pricer = laid(LAYOUTS[layout])
    rng = random.Random(seed)
    stage = {op: rng.randrange(3) for op in partitioned.graph.ops}
    parts = [
        terms_of(partitioned, pricer, state_ratio, [op for op in stage if stage[op] == number])
        for number in range(3)
    ]
    step = terms_of(partitioned, pricer, state_ratio)
    assert parts[0] + parts[1] + parts[2] == step
    assert all(part != step for part in parts)
    assert np.count_nonzero(step.vector) >= 5, "compute, collectives, variables"


def test_a_cost_is_what_the_terms_of_a_step_come_to():
    partitioned, pricer = laid(LAYOUTS["model"])
    cost = evaluate(partitioned, CLUSTER, pricer.roles)
    assert cost.live_bytes is not None
    found = pricer.cost(terms_of(partitioned, pricer))
    assert (found.seconds, found.weight_bytes) == (cost.seconds, cost.weight_bytes)
    assert found.collectives == cost.collectives > 0
