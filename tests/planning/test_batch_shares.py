"""Shares of the batch by the speeds of ranks: which are tried, and when they are taken."""

import dataclasses
import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.graphs import mlp
from tfpar.cluster import Cluster, Device, Level, Node
from tfpar.constraints import shard
from tfpar.cost import Cost, evaluate
from tfpar.ir import Roles
from tfpar.planning.meshes import input_spec
from tfpar.planning.pricing.batch_shares import (
    LinearTimeModel,
    balance_units,
    optimize_shares,
    uneven_axes,
)
from tfpar.planning.pricing.price import (
    ShareAxis,
    SingleStagePricer,
    ViewedPlan,
    combine_slowest,
    price_along,
)
from tfpar.plans import Plan, plan_from_constraints
from tfpar.propagation import UnevenSplitError, check_shares, prepare, propagate
from tfpar.spec import Mesh, Replicate, Shard, UnevenMesh

FAST = Device({"float32": 3e9}, 2**30, 3e8, name="fast")
SLOW = Device({"float32": 1e9}, 2**30, 1e8, name="slow")
BATCH = 64


class Planned(NamedTuple):
    """A step without a fixed part that depends on no sample: only weights are read."""

    plan: Plan
    step: SingleStagePricer

    @property
    def cluster(self) -> Cluster:
        return self.step.cluster

    def shared(self, limit: float = 2**30) -> Plan:
        return optimize_shares(self.step, self.plan, self.cluster, BATCH, limit)

    def costs(self, shares: tuple[int, ...] = ()) -> list[Cost]:
        """At each coordinate of the first axis."""
        mesh = UnevenMesh.over(self.plan.mesh, 0, shares) if shares else None
        return [one.plan.cost for one in self.along(mesh)]

    def along(self, mesh: UnevenMesh | None = None) -> list[ViewedPlan]:
        return price_along(self.step, self.plan, self.cluster, ShareAxis(0, 0, mesh))


def planned_on(*devices, mesh=None, constraints=(), **changes) -> Planned:
    cluster = Cluster("some", tuple(map(Node, devices)), (Level(len(devices), 1e9, 1e-6),))
    cluster = dataclasses.replace(cluster, **changes)
    graph, mesh = mlp(batch=BATCH), mesh or Mesh.of([len(devices)])
    plan = plan_from_constraints(graph, mesh, constraints)
    axes = [mesh.axis(name) for name in plan.batch_axes]
    anchors = dataclasses.replace(plan.anchors(), inputs=[input_spec(True, mesh, axes)])
    laid, roles = propagate(prepare(graph), mesh, anchors), Roles.of(graph)
    plan = plan.with_findings(cost=evaluate(laid, cluster, roles), passed_over=(1e-9, 3))
    return Planned(plan, SingleStagePricer(laid, roles, cluster, None))


@pytest.mark.parametrize("devices", [(FAST, SLOW), (SLOW, FAST), (FAST, FAST, SLOW, SLOW)])
def test_faster_ranks_get_more(devices):
    planned = planned_on(*devices)
    found = planned.shared()
    (shares,) = found.shares.values()
    assert sum(shares) == BATCH
    assert [n > BATCH / len(devices) for n in shares] == [d is FAST for d in devices]
    seconds = [cost.seconds for cost in planned.costs(shares)]
    assert found.cost.seconds == max(seconds) < planned.plan.cost.seconds
    # One sample more for a slow rank, and the step is no faster.
    moved = list(shares)
    moved[devices.index(FAST)] -= 1
    moved[devices.index(SLOW)] += 1
    assert max(cost.seconds for cost in planned.costs(tuple(moved))) >= found.cost.seconds
    assert found.findings.passed_over is None  # it was compared with equal shares


def test_equal_shares_are_priced_at_the_rates_of_each():
    planned = planned_on(FAST, SLOW)
    fast, slow = planned.costs()
    assert slow.seconds == planned.plan.cost.seconds > fast.seconds
    assert sum(slow.compute_s) == pytest.approx(3 * sum(fast.compute_s))


def test_no_rank_is_as_slow_in_everything_as_the_slowest_is_in_something():
    multiplies = dataclasses.replace(FAST, memory_bandwidth=1e7)
    reads = dataclasses.replace(FAST, flops={"float32": 1e7})
    planned = planned_on(reads, multiplies)
    along = planned.along()
    assert combine_slowest([one.plan for one in along]).cost.seconds < planned.plan.cost.seconds


def test_ranks_that_are_alike_get_the_same():
    for devices in ((FAST, FAST), (SLOW, SLOW)):
        planned = planned_on(*devices)
        assert not uneven_axes(planned.plan, planned.cluster)
        assert planned.shared() is planned.plan


def test_a_model_axis_of_unequal_ranks_has_no_shares():
    """Every coordinate of the data axis has a fast and a slow rank."""
    columns = [shard(".*fc1/kernel", dim=1, axis="model")]
    planned = planned_on(FAST, SLOW, FAST, SLOW, mesh=Mesh.of([2, 2]), constraints=columns)
    assert planned.shared() is planned.plan
    planned = planned_on(FAST, FAST, SLOW, SLOW, mesh=Mesh.of([2, 2]), constraints=columns)
    ((name, (more, fewer)),) = planned.shared().shares.items()
    assert name == "data" and more > fewer


def test_shares_have_to_fit():
    planned = planned_on(FAST, SLOW)
    assert planned.shared(planned.plan.cost.memory_bytes) is planned.plan


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5)), min_size=2, max_size=3),
    st.integers(0, 8),
)
def test_no_other_shares_end_sooner(lines, more):
    units = len(lines) + more

    def longest(shares: tuple[int, ...]) -> float:
        return max(LinearTimeModel(*line).seconds(n) for line, n in zip(lines, shares, strict=True))

    found = balance_units([LinearTimeModel(*line) for line in lines], units)
    assert sum(found) == units and min(found) >= 1
    ways = itertools.product(range(1, more + 2), repeat=len(lines))
    assert longest(found) == min(longest(shares) for shares in ways if sum(shares) == units)


def test_few_samples_are_shared_out_for_the_slowest():
    """In proportion it would be 3.4 and 1.6: 3 and 2 take the slow ones longer than 4 and 1."""
    fast, slow = LinearTimeModel(0.0, 1 / 3.4), LinearTimeModel(0.0, 1 / 1.6)
    assert balance_units([fast, fast, slow, slow], 10) == (4, 4, 1, 1)


def test_ranks_of_one_memory_have_none():
    planned = planned_on(FAST, SLOW)
    one_memory = dataclasses.replace(planned.cluster, one_memory=True)
    assert not uneven_axes(planned.plan, one_memory)


def test_what_is_not_cut_in_proportion_is_refused():
    planned = planned_on(FAST, SLOW)
    mesh, laid = planned.plan.mesh, planned.step.laid
    check_shares(laid, UnevenMesh.over(mesh, 0, (48, 16)))
    with pytest.raises(UnevenSplitError):  # the batch is no multiple of 7
        check_shares(laid, UnevenMesh.over(mesh, 0, (5, 2)))
    variable = laid.graph.variables[0]
    laid.variable_specs[variable] = (Shard(0),)
    with pytest.raises(UnevenSplitError, match=variable.name):
        check_shares(laid, UnevenMesh.over(mesh, 0, (48, 16)))
    laid.variable_specs[variable] = (Replicate(),)
