"""What is said where no plan fits: what lies where, what is lacking, and only what helps."""

from __future__ import annotations

import dataclasses
import time

import pytest

from tests.graphs import saved
from tests.planning.changes import changed
from tests.planning.problems import Captured
from tests.planning.test_slots import MACHINES, problem_of
from tfpar.planning import solve
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.memory.memory_errors import LeastMemory, check_room, memory_error
from tfpar.planning.memory.relayout import fastest_plan
from tfpar.planning.pricing.price import price_whole
from tfpar.plans import Offload, OffloadPlan
from tfpar.spec import MemoryLimitError

WEIGHTS = 4 * (64 * 64 + 64 * 64 + 64 * 6)
"""Bytes of the weights of `problem_of()`, on 4 ranks."""


def problem_with_updates_last(**arguments):
    """As planning graphs have them."""
    problem = problem_of(**arguments)
    updates = {*problem.step.graph.effects}
    problem.step.graph.ops.sort(key=lambda op: op in updates)
    return problem


def on(problem, memory=1e10, host=None):
    """`problem` on devices, and hosts, with so much memory."""
    cluster = MACHINES.with_device(memory_bytes=memory).with_host_memory(host)
    return changed(problem, cluster=cluster)


def refused(problem) -> str:
    ranks = problem.meshes[0].mesh.size
    with pytest.raises(MemoryLimitError) as error:
        check_room(problem, [problem.memory_limit] * ranks)
    return str(error.value)


class Unasked(TapPlanner):
    def solve(self, problem):
        raise AssertionError("what has no room is not searched")


def test_weights_and_gradients_that_are_too_large_are_refused_at_once():
    """Five hundred million rows of 400 entries, on 16 devices of 80 GB."""
    step = saved("embedded")
    rows = next(v for v in step.graph.variables if v.name == "tokens/embeddings")
    gradient = next(g for g in step.gradients if g.variable == rows.name).values
    gradient.shape = shape = (500_000_000, 400)
    at = step.graph.variables.index(rows)
    step.graph.variables[at] = dataclasses.replace(rows, shape=shape)
    captured = Captured(step, step.graph.inputs[0].shape[0])
    problem = captured.problem([2, 8], "dgx-a100")
    problem = problem.with_step(state_ratio=0.0)
    begin = time.process_time()
    with pytest.raises(MemoryLimitError) as error:
        solve.find_plan(problem, Unasked())
    assert time.process_time() - begin < 1.0
    text = str(error.value)
    assert "weights and gradients evenly" in text and "(above 20 of these)" in text
    assert "slot" not in text and "host" not in text, "SGD has none"


def test_the_bound_is_below_what_any_plan_stores():
    for name in ("mlp", "embedded"):
        problem = Captured.saved(name).problem([2], "dgx-a100")
        problem = problem.with_storage(offload=Offload())
        least = LeastMemory.of(problem)
        assert least.gradient_bytes == pytest.approx(least.weight_bytes, rel=0.01), "each once"
        stored = TapPlanner().solve(problem.with_objective(memory_limit=0.0)).cost.memory_bytes
        assert 2 * stored / 3 < least.total <= 2 * stored, name


def test_slots_count_where_no_host_has_room_for_them():
    problem = problem_with_updates_last(state_ratio=2.0)
    kept = changed(problem, offload=Offload())
    assert LeastMemory.of(kept).total == 4 * WEIGHTS
    least = LeastMemory.of(on(problem))
    assert (least.total, least.host_slot_bytes) == (2 * WEIGHTS, 2 * WEIGHTS)
    # A host of four devices.
    least = LeastMemory.of(on(problem, host=WEIGHTS / 2))
    assert (least.state_bytes, least.host_slot_bytes) == pytest.approx((1.5 * WEIGHTS, WEIGHTS / 2))
    # Where weights are updated one after another, only one gradient needs to be there.
    assert LeastMemory.of(problem_of()).gradient_bytes == 4 * 64 * 64
    bound = changed(problem, bound=frozenset(v.name for v in problem.step.graph.variables))
    assert LeastMemory.of(bound).host_slot_bytes == 0


def test_only_what_helps_is_advised():
    problem = problem_with_updates_last(state_ratio=2.0)
    text = refused(on(problem, memory=WEIGHTS / 4))
    assert "; in host memory slots" in text and "fewer slots" not in text
    text = refused(on(changed(problem, offload=Offload()), memory=WEIGHTS / 4))
    assert "slots and other state" in text and "in host memory (offload=" in text
    assert "an optimizer with fewer slots" in text and "weights with their slots weigh" in text
    text = refused(on(problem, memory=WEIGHTS / 4, host=WEIGHTS / 2))
    assert "fewer slots, hosts with more memory" in text and "(offload=" not in text
    for ratio in (0.0, None):
        text = refused(on(changed(problem, state_ratio=ratio), memory=WEIGHTS / 8))
        assert "slot" not in text and "host" not in text


def test_a_plan_that_has_more_in_host_memory_than_there_is_does_not_fit():
    """By the slots that lie there; what is on the device would fit."""
    problem = problem_of()
    plan = fastest_plan(problem, TapPlanner())
    plan = dataclasses.replace(plan, offloaded=OffloadPlan(tuple(plan.variables)))
    cost, laid = price_whole(plan, problem)
    assert cost.host_slot_bytes == cost.host_bytes == 2 * WEIGHTS and not cost.state_bytes
    roomy, full = on(problem, host=8 * WEIGHTS), on(problem, host=4 * WEIGHTS)
    assert not roomy.excess(cost) and not roomy.excess_in_parts(cost)
    assert full.excess(cost) == full.excess_in_parts(cost) == WEIGHTS
    priced = plan.with_findings(cost=cost)
    found = [dataclasses.replace(priced, cluster=p.cluster) for p in (roomy, full)]
    assert [one.fits(1e10) for one in found] == [True, False]
    text = str(memory_error(found[1], laid, full))
    assert text.startswith("No plan fits into the memory of the host of a device of 'machines'")
    assert "in host memory slots" in text and "a rank may have" in text
    assert "host_memory in the cluster file" in text and "memory_limit=" not in text


def test_what_lies_where_is_said_of_the_best_plan():
    problem = problem_of()
    plan = fastest_plan(problem, TapPlanner())
    plan = dataclasses.replace(plan, offloaded=OffloadPlan(tuple(plan.variables)))
    cost, laid = price_whole(plan, problem)
    plan, small = plan.with_findings(cost=cost), on(problem, memory=cost.memory_bytes / 2)
    text = str(memory_error(plan, laid, small))
    assert "into the memory of a device of" in text and "; in host memory slots 67" in text
    assert "fewer slots" not in text and "their slots" not in text
    without = changed(small, state_ratio=0.0)
    assert "slots" not in str(memory_error(fastest_plan(without, TapPlanner()), laid, without))
