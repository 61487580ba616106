"""Shares of the batch by the speeds of ranks: which are tried, and when they are taken."""

import dataclasses

import pytest

from tests.plan.graphs import mlp
from tfpar.cluster.description import Cluster, Device, Level, Node
from tfpar.constraints import shard
from tfpar.cost.evaluate import evaluate
from tfpar.ir.roles import Roles
from tfpar.plans import plan_from_constraints
from tfpar.propagation.engine import propagate
from tfpar.propagation.prepared import prepare
from tfpar.propagation.shares import CannotShare, check_shares
from tfpar.search.meshes import input_spec
from tfpar.search.shares import StepByRank, in_shares, slowest, uneven_axes
from tfpar.spec import Mesh, Replicate, Shard, UnevenMesh

FAST = Device({"float32": 3e9}, 2**30, 3e8, name="fast")
SLOW = Device({"float32": 1e9}, 2**30, 1e8, name="slow")
BATCH = 64


def step_on(*devices, mesh=None, constraints=(), **changes) -> StepByRank:
    """A step without a fixed part that depends on no sample: only weights are read."""
    cluster = Cluster("some", tuple(map(Node, devices)), (Level(len(devices), 1e9, 1e-6),))
    cluster = dataclasses.replace(cluster, **changes)
    graph, mesh = mlp(batch=BATCH), mesh or Mesh.of([len(devices)])
    plan = plan_from_constraints(graph, mesh, constraints)
    axes = [mesh.axis(name) for name in plan.batch_axes]
    anchors = dataclasses.replace(plan.anchors(), inputs=[input_spec(True, mesh, axes)])
    laid, roles = propagate(prepare(graph), mesh, anchors), Roles.of(graph)
    plan = dataclasses.replace(plan, cost=evaluate(laid, cluster, roles), passed_over=(1e-9, 3))
    return StepByRank(plan, laid, roles, cluster, None)


def shared(step: StepByRank, limit: float = 2**30):
    return in_shares(step, BATCH, limit)


@pytest.mark.parametrize("devices", [(FAST, SLOW), (SLOW, FAST), (FAST, FAST, SLOW, SLOW)])
def test_faster_ranks_get_more(devices):
    step = step_on(*devices)
    found = shared(step)
    (shares,) = found.shares.values()
    assert sum(shares) == BATCH
    assert [n > BATCH / len(devices) for n in shares] == [d is FAST for d in devices]
    costs = step.uneven(UnevenMesh.over(found.mesh, 0, shares))
    assert found.cost == slowest(costs) and found.cost.seconds < step.plan.cost.seconds
    # One sample more for a slow rank, and the step is no faster.
    moved = list(shares)
    moved[devices.index(FAST)] -= 1
    moved[devices.index(SLOW)] += 1
    other = slowest(step.uneven(UnevenMesh.over(found.mesh, 0, moved)))
    assert other.seconds >= found.cost.seconds
    assert found.passed_over is None  # it was compared with equal shares


def test_equal_shares_are_priced_at_the_rates_of_each():
    step = step_on(FAST, SLOW)
    fast, slow = step.even(0)
    assert slow.seconds == step.plan.cost.seconds > fast.seconds
    assert sum(slow.compute_s) == pytest.approx(3 * sum(fast.compute_s))


def test_no_rank_is_as_slow_in_everything_as_the_slowest_is_in_something():
    multiplies = dataclasses.replace(FAST, memory_bandwidth=1e7)
    reads = dataclasses.replace(FAST, flops={"float32": 1e7})
    step = step_on(reads, multiplies)
    assert slowest(step.even(0)).seconds < step.plan.cost.seconds


def test_ranks_that_are_alike_get_the_same():
    for devices in ((FAST, FAST), (SLOW, SLOW)):
        step = step_on(*devices)
        assert not uneven_axes(step.plan, step.cluster) and shared(step) is step.plan


def test_a_model_axis_of_unequal_ranks_has_no_shares():
    """Every coordinate of the data axis has a fast and a slow rank."""
    columns = [shard(".*fc1/kernel", dim=1, axis="model")]
    step = step_on(FAST, SLOW, FAST, SLOW, mesh=Mesh.of([2, 2]), constraints=columns)
    assert shared(step) is step.plan
    step = step_on(FAST, FAST, SLOW, SLOW, mesh=Mesh.of([2, 2]), constraints=columns)
    ((name, (more, fewer)),) = shared(step).shares.items()
    assert name == "data" and more > fewer


def test_shares_have_to_fit():
    step = step_on(FAST, SLOW)
    assert shared(step, step.plan.cost.memory_bytes) is step.plan


def test_ranks_of_one_memory_and_steps_in_pieces_have_none():
    step = step_on(FAST, SLOW)
    one_memory = dataclasses.replace(step.cluster, one_memory=True)
    assert not uneven_axes(step.plan, one_memory)
    assert not uneven_axes(dataclasses.replace(step.plan, chunks=2), step.cluster)


def test_what_is_not_cut_in_proportion_is_refused():
    step = step_on(FAST, SLOW)
    check_shares(step.laid, UnevenMesh.over(step.plan.mesh, 0, (48, 16)))
    with pytest.raises(CannotShare):  # the batch is no multiple of 7
        check_shares(step.laid, UnevenMesh.over(step.plan.mesh, 0, (5, 2)))
    variable = step.laid.graph.variables[0]
    step.laid.variable_specs[variable] = (Shard(0),)
    with pytest.raises(CannotShare, match=variable.name):
        check_shares(step.laid, UnevenMesh.over(step.plan.mesh, 0, (48, 16)))
    step.laid.variable_specs[variable] = (Replicate(),)
