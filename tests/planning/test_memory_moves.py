"""The memory loop: which moves are tried, in which order, and what is told of them."""

from __future__ import annotations

import dataclasses

import pytest

from tests.graphs import BATCH, saved
from tests.planning.test_saved_graphs import SLOW
from tfpar.cost import Cost
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.memory.fit import MemoryFit
from tfpar.planning.objective import UNCERTAINTY
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepSearch
from tfpar.plans import Candidate, Findings, Plan
from tfpar.spec import Mesh

LIMIT = 10.0


def priced(seconds: float, memory: float) -> Plan:
    nothing = (0.0, 0.0, 0.0)
    cost = Cost(seconds, nothing, nothing, 0.0, 0.0, 1, weight_bytes=memory)
    return Plan(Mesh.of([2]), (), {}, {}, (), "", findings=Findings(cost))


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A move that makes plans of (seconds, bytes)."""

    name: str
    made: tuple[tuple[float, float], ...]
    asked: list[str]

    def plans(self, fit):
        self.asked.append(self.name)
        for seconds, memory in self.made:
            yield priced(seconds, memory)


def fitted(start, *moves) -> tuple[Plan, list[str]]:
    asked: list[str] = []
    fit = MemoryFit(lambda plan: max(0.0, plan.cost.memory_bytes - LIMIT))
    scripted = [Scripted(name, made, asked) for name, *made in moves]
    start = None if start is None else priced(*start)
    return fit.run(start, [dataclasses.replace(m, made=tuple(m.made)) for m in scripted]), asked


def test_a_plan_that_fits_is_left_as_it_is():
    plan, asked = fitted((1.0, LIMIT), ("shard", (0.5, 1.0)))
    assert plan.cost.seconds == 1.0 and not asked and not plan.findings.attempts


def test_moves_end_with_a_plan_that_predictions_cannot_tell_from_the_fastest():
    near = 1 + 0.9 * UNCERTAINTY
    plan, asked = fitted((1.0, 20.0), ("shard", (near, 9.0)), ("recompute", (0.9, 8.0)))
    assert asked == ["shard"] and plan.cost.seconds == near
    assert [(a.name, a.fits) for a in plan.findings.attempts] == [("shard", True)]


def test_the_fastest_of_all_that_fit_is_taken_with_the_log_of_what_was_tried():
    moves = (
        ("shard", (1.01, 11.0)),
        ("another layout", (2.0, 9.0), (1.5, 12.0)),
        ("offload", (1.7, 5.0)),
    )
    plan, asked = fitted((1.0, 20.0), *moves)
    assert plan.cost.seconds == 1.7 and asked == ["shard", "another layout", "offload"]
    told = [(a.name, a.seconds, a.memory_bytes, a.fits) for a in plan.findings.attempts]
    assert told == [
        ("shard", 1.01, 11.0, False),
        ("another layout", 2.0, 9.0, True),
        ("another layout", 1.5, 12.0, False),
        ("offload", 1.7, 5.0, True),
    ]


def test_what_was_tried_on_the_way_to_a_plan_that_lost_is_told_too():
    tried = tuple(Candidate(move, 1.0, 30.0, fits=False) for move in ("before", "aside"))
    start, lost = (priced(1.0, 20.0).with_findings(attempts=(attempt,)) for attempt in tried)

    class Given(Scripted):
        def plans(self, fit):
            yield from (lost, priced(2.0, 9.0))

    fit = MemoryFit(lambda plan: max(0.0, plan.cost.memory_bytes - LIMIT))
    plan = fit.run(start, [Given("another layout", (), [])])
    assert plan.cost.seconds == 2.0
    assert [one.name for one in plan.findings.attempts] == [
        *("before", "aside"),
        *("another layout", "another layout"),
    ]


def test_where_nothing_fits_it_is_the_plan_of_which_least_is_missing():
    plan, _ = fitted(None, ("a", (1.0, 20.0)), ("b", (5.0, 12.0)))
    assert plan.cost.memory_bytes == 12.0 and len(plan.findings.attempts) == 2


@pytest.mark.parametrize("pipeline_stages", [1, 2])
def test_a_plan_under_a_limit_tells_what_was_tried(pipeline_stages):
    from tfpar.pipeline import Pipeline

    step = saved("wide")
    pipeline = None if pipeline_stages == 1 else Pipeline(2, 2)
    mesh = Mesh.of([4]).divided(pipeline_stages)
    search = StepSearch(step, BATCH, find_planner("tap"), state_ratio=2.0)
    free, _ = search(PlanRequest(mesh, SLOW, pipeline=pipeline))
    assert not free.findings.attempts and free.cost is not None
    limit = 0.85 * free.cost.memory_bytes
    plan, _ = search(PlanRequest(mesh, SLOW.with_memory(limit), pipeline=pipeline))
    assert plan.findings.attempts and plan.cost.memory_bytes <= limit
    assert Plan.from_json(plan.to_json()).findings.attempts == plan.findings.attempts
    first = plan.findings.attempts[0]
    text = plan.explain("head/kernel")
    assert "Tried to make the plan fit into memory:" in text and f"{first.name}: " in text
    assert "Tried" not in free.explain("head/kernel")
