"""Slots in host memory, where a plan does not fit else: what it saves, and what it costs."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.cases import deep_list
from tests.planning.changes import changed
from tests.planning.problems import Captured
from tests.planning.test_slots import MACHINES, WHOLE, problem_of, weights_of
from tfpar.cluster import Cluster, Device, Level
from tfpar.ir import traits
from tfpar.planning.cache import problem_digest
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.memory.limit import solve_under_memory_limit
from tfpar.planning.memory.offload_moves import offload_slots, with_offloaded_slots
from tfpar.planning.memory.plan_transforms import apply_plan_transforms
from tfpar.planning.memory.relayout import fastest_plan
from tfpar.planning.memory.shard_slots import with_sharded_slots
from tfpar.planning.memory.shard_weights import with_sharded_weights
from tfpar.planning.pricing.price import price_whole
from tfpar.planning.solve import find_plan
from tfpar.plans import Offload, OffloadPlan, Plan
from tfpar.spec import ArgumentError, PlanError, SpecError

KERNELS = [4 * 64 * 64, 4 * 64 * 64, 4 * 64 * 6]
"""Bytes of the weights of `problem_of()`."""
NAMES = tuple(f"layer_{i}/kernel" for i in (1, 2, 3))


@pytest.fixture(scope="module")
def problem():
    return problem_of()


@pytest.fixture(scope="module")
def fastest(problem):
    return fastest_plan(problem, TapPlanner())


def away(plan: Plan, *names: str) -> Plan:
    return dataclasses.replace(plan, offloaded=OffloadPlan(names or NAMES))


def linked(problem, bandwidth: float, latency_s: float = 0.0):
    """`problem` on machines with such a link to their hosts."""
    link = dict(host_bandwidth=bandwidth, host_latency_s=latency_s)
    return changed(problem, cluster=MACHINES.with_device(**link))


def test_patterns_are_checked_where_they_are_written():
    assert Offload("table/.*", ["block_1"]) == Offload(("table/.*",), ("block_1",))
    with pytest.raises(ArgumentError, match="Offload's optimizer is 3; it must be True, False, or"):
        Offload(optimizer=3)
    with pytest.raises(ArgumentError, match=r"Offload\(activations=\[.*\]\): the pattern is \["):
        Offload(activations=deep_list())
    with pytest.raises(SpecError, match=r"Offload\(optimizer='a\('\): the pattern is not a reg"):
        Offload(optimizer=["a("])


def test_what_is_offloaded_is_not_stored_and_crosses_the_link_twice(problem, fastest):
    machines = linked(problem, 1e9, 1e-3)
    before, _ = price_whole(fastest, machines)
    cost, _ = price_whole(away(fastest), machines)
    assert before.state_bytes - cost.state_bytes == 2 * sum(KERNELS)
    assert cost.weight_bytes == before.weight_bytes
    # Two slots of three weights, each there and back.
    copies = 2 * 2 * 3 * 1e-3 + 2 * 2 * sum(KERNELS) / 1e9
    assert cost.compute_s[2] - before.compute_s[2] == pytest.approx(copies)
    assert cost.seconds - before.seconds == pytest.approx(copies)
    assert cost.compute_s[:2] == before.compute_s[:2]
    some, _ = price_whole(away(fastest, NAMES[2]), machines)
    assert before.state_bytes - some.state_bytes == 2 * KERNELS[2]


def test_slots_of_some_weights_are_on_the_device_in_passing(problem, fastest):
    before, _ = price_whole(fastest, problem)
    cost, _ = price_whole(away(fastest), problem)
    passing = traits.IN_FLIGHT * 2 * KERNELS[0]
    assert before.live_bytes <= cost.live_bytes <= before.live_bytes + passing
    assert cost.memory_bytes < before.memory_bytes


@pytest.mark.parametrize("together", [True, False])
def test_in_the_memory_of_the_host_nothing_is_gained(problem, fastest, together):
    own = {"host_bandwidth": MACHINES.device.host_bandwidth if together else math.inf}
    cluster = dataclasses.replace(MACHINES.with_device(**own), one_memory=together)
    assert cluster.in_host_memory and not MACHINES.in_host_memory
    here = changed(problem, cluster=cluster)
    assert price_whole(away(fastest), here)[0] == price_whole(fastest, here)[0]
    assert offload_slots(fastest, here, NAMES) is None
    assert with_offloaded_slots(fastest, here) is None


def test_as_many_as_it_takes(problem, fastest):
    def found(saved: float) -> tuple[str, ...]:
        limit = fastest.cost.memory_bytes - saved
        plan = with_offloaded_slots(fastest, problem.with_objective(memory_limit=limit))
        return plan.offloaded.slots

    assert found(1.0) in (NAMES[:1], NAMES)
    assert set(found(1e9)) == set(NAMES)
    assert offload_slots(fastest, problem, NAMES).offloaded.slots == NAMES
    decided = changed(problem, offload=Offload())
    assert offload_slots(fastest, decided, NAMES) is None
    assert with_offloaded_slots(fastest, problem_of(state_ratio=0.0)) is None


def solved(problem, limit: float) -> Plan:
    plan = solve_under_memory_limit(problem.with_objective(memory_limit=limit), TapPlanner())
    assert plan.cost is not None
    return plan


def below_all_others(problem, fastest) -> float:
    """A limit that no plan keeps to that has all its slots on devices."""
    least = with_sharded_slots(
        TapPlanner().solve(problem.with_objective(memory_limit=0.0)), problem
    )
    split = with_sharded_weights(fastest, problem)
    assert least is None
    return split.cost.memory_bytes - split.cost.state_bytes / 2


def test_where_nothing_else_fits_weights_are_sharded_and_slots_offloaded(problem, fastest):
    limit = below_all_others(problem, fastest)
    plan = solved(problem, limit)
    assert plan.offloaded.slots and set(plan.offloaded.slots) <= set(NAMES)
    assert WHOLE not in weights_of(plan), "each rank moves its part"
    assert all(plan.variables[name].gathered for name in NAMES)
    assert plan.cost.memory_bytes <= limit
    again, _ = price_whole(plan, problem)
    assert again.seconds == pytest.approx(plan.cost.seconds)


def test_what_fits_is_left_alone(problem, fastest):
    assert solved(linked(problem, 1e15), math.inf).offloaded == OffloadPlan()
    never = changed(linked(problem, 1e12), offload=Offload())
    assert not solved(never, below_all_others(problem, fastest)).offloaded


def test_what_is_asked_for_is_searched_with(problem):
    asked = changed(problem, offload=Offload(optimizer=["layer_[12]/kernel"]))
    plan = solved(asked, math.inf)
    assert plan.offloaded.slots == NAMES[:2]
    assert plan.cost.seconds == pytest.approx(price_whole(plan, problem)[0].seconds)
    assert plan.cost.state_bytes < solved(problem, math.inf).cost.state_bytes
    assert problem_digest(asked, TapPlanner()) != problem_digest(problem, TapPlanner())
    everything = changed(problem, offload=Offload(optimizer=True))
    assert len(solved(everything, math.inf).offloaded.slots) == len(weights(problem))
    wrong = changed(problem, offload=Offload(optimizer="kernels"))
    with pytest.raises(SpecError, match="'kernels'. matches no weight that has optimizer slots"):
        solved(wrong, math.inf)


def weights(problem) -> list[str]:
    return [v.name for v in problem.step.graph.variables if v.trainable]


def test_the_problem_of_a_plan(problem, fastest):
    again = apply_plan_transforms(problem, away(fastest))
    assert [v.name for v in again.step.graph.variables if v.offloaded] == [*NAMES]
    assert again.step.graph is apply_plan_transforms(problem, away(fastest)).step.graph
    assert not any(v.offloaded for v in problem.step.graph.variables)
    with pytest.raises(PlanError, match="does not have: 'no'"):
        away(fastest, "no")


@pytest.mark.slow
def test_the_link_to_the_host_decides_what_leaves_or_is_computed_again():
    captured = Captured.saved("gpt_5_layers")

    def found(limit: float, bandwidth: float) -> Plan:
        device = Device({"float32": 1e12}, limit, 1e12, host_bandwidth=bandwidth, host_latency_s=0)
        one = Cluster.regular("one", device, [Level(1, 1e8, 1e-5)])
        return find_plan(captured.problem([1], one), TapPlanner())

    ample = found(1e12, 1e13)
    assert not ample.offloaded and not ample.recompute
    quick, slow = (found(0.75 * ample.cost.memory_bytes, by) for by in (1e13, 1e6))
    assert len(quick.offloaded.activations) == 5 and not quick.offloaded.slots
    assert len(slow.recompute) == 5 and not slow.offloaded and not quick.recompute
    assert ample.cost.seconds < quick.cost.seconds < slow.cost.seconds
    both = found(0.6 * ample.cost.memory_bytes, 1e13)
    assert len(both.offloaded.activations) == 5 and both.offloaded.slots and not both.recompute
