"""The memory loop: which moves are tried, in which order, and what is told of them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.graphs import BATCH, saved
from tests.planning.test_saved_graphs import SLOW
from tests.planning.tiny import Step, problem
from tfpar.cluster import Cluster, Device, Level
from tfpar.cost import Cost
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.memory import limit
from tfpar.planning.memory.fit import MemoryFit, MemoryMove, MoveEstimate
from tfpar.planning.memory.relayout import fastest_plan
from tfpar.planning.objective import UNCERTAINTY
from tfpar.planning.problem import Problem
from tfpar.planning.problems import state_problem
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepSearch
from tfpar.plans import Candidate, Findings, Plan
from tfpar.spec import Mesh, PlanError

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
    known: MoveEstimate = MoveEstimate()

    def estimate(self, fit):
        return self.known

    def plans(self, fit):
        self.asked.append(self.name)
        for seconds, memory in self.made:
            yield priced(seconds, memory)


def fitted(start, *moves, known: dict[str, MoveEstimate] | None = None) -> tuple[Plan, list[str]]:
    """The plan, and the moves that were tried, in order."""
    asked: list[str] = []
    fit = MemoryFit(lambda plan: max(0.0, plan.cost.memory_bytes - LIMIT))
    scripted = [
        Scripted(name, tuple(made), asked, (known or {}).get(name, MoveEstimate()))
        for name, *made in moves
    ]
    return fit.run(None if start is None else priced(*start), scripted), asked


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


def test_moves_are_tried_by_what_a_byte_costs_whatever_order_they_are_given_in():
    made = {"a": (4.0, 13.0), "b": (3.0, 12.0), "c": (2.0, 11.0), "d": (1.5, 12.5)}
    known = {"a": MoveEstimate(3.0), "b": MoveEstimate(1.0), "c": MoveEstimate(2.0)}
    for given in itertools.permutations(made.items()):
        _, asked = fitted((1.0, 20.0), *given, known=known)
        assert asked == ["d", "b", "c", "a"]
    equal = dict.fromkeys(made, MoveEstimate(1.0))
    assert fitted((1.0, 20.0), *made.items(), known=equal)[1] == [*made]


def test_a_move_that_can_make_no_faster_plan_is_not_tried():
    moves = ("slow", (2.5, 1.0)), ("slower", (3.0, 1.0)), ("open", (1.5, 9.0))
    known = {"slow": MoveEstimate(1.0, 1.9), "slower": MoveEstimate(2.0, 2.5)}
    plan, asked = fitted((1.0, 20.0), *moves[:2], known=known)
    assert asked == ["slow"] and plan.cost.seconds == 2.5
    plan, asked = fitted((1.0, 20.0), *moves, known=known)
    assert asked == ["open"] and plan.cost.seconds == 1.5
    nothing_fits = ("open", (1.5, 11.0))
    assert fitted((1.0, 20.0), nothing_fits, moves[1], known=known)[1] == ["open", "slower"]


def test_moves_are_made_as_they_are_needed():
    def moves():
        yield Scripted("free", ((1.01, 9.0),), asked)
        raise AssertionError("the plan fits already")

    asked: list[str] = []
    fit = MemoryFit(lambda plan: max(0.0, plan.cost.memory_bytes - LIMIT))
    assert fit.run(priced(1.0, 20.0), moves()).cost.seconds == 1.01 and asked == ["free"]


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


# --- moves of steps ---------------------------------------------------------------------


def machines(flops: float, host_bandwidth: float, ranks: int = 2) -> Cluster:
    device = Device({"float32": flops}, 2**40, flops / 10, 1e-6, host_bandwidth=host_bandwidth)
    return Cluster.regular("equal devices", device, [Level(ranks, 4e9, 1e-6)])


FAST_LINK = machines(1e10, 1e10)
"""Slow devices, whose hosts are near."""

SLOW_LINK = machines(1e12, 1e9)


class Counting(TapPlanner):
    """Counts its searches."""

    def __init__(self) -> None:
        self.searches = 0

    def solve(self, problem: Problem) -> Plan:
        self.searches += 1
        return super().solve(problem)


@dataclasses.dataclass(frozen=True)
class Unestimated:
    """A move of which nothing is known before it is tried."""

    move: MemoryMove

    @property
    def name(self) -> str:
        return self.move.name

    def estimate(self, fit):
        return MoveEstimate()

    def plans(self, fit):
        return self.move.plans(fit)


class InGivenOrder(MemoryFit):
    """The loop over moves as they are given."""

    def run(self, start, moves):
        return super().run(start, map(Unestimated, moves))


class EveryMove(InGivenOrder):
    """The loop that tries all moves."""

    def is_settled(self) -> bool:
        return False


def wide_blocks() -> Problem:
    """Four blocks that keep 16 times what they give."""
    step = Step(4096, 32)
    x = step.x
    for i in range(4):
        x = step.dense(f"block_{i}/up", x, 512, "Relu")
        x = step.dense(f"block_{i}/down", x, 32, "Relu")
    return problem(step.train(x), [2])


def solved(
    within: Problem, part: float, loop: type[MemoryFit] = MemoryFit
) -> tuple[Plan | None, int]:
    """The plan for a part of what the fastest stores, and the number of searches that it took; None
    if there is none."""
    planner = Counting()
    stored = fastest_plan(within, planner).cost.memory_bytes
    within = within.with_objective(memory_limit=part * stored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limit, "MemoryFit", loop)
        try:
            plan = limit.solve_under_memory_limit(within, planner)
        except PlanError:
            return None, planner.searches
    return (None if within.excess(plan.cost) else plan), planner.searches


def tried(plan: Plan) -> list[str]:
    return [*dict.fromkeys(attempt.name for attempt in plan.findings.attempts)]


@pytest.mark.parametrize(
    "cluster, moves, searches",
    [
        (FAST_LINK, ["another layout", "offload activations"], (3, 5)),
        (SLOW_LINK, ["another layout", "another layout, 4 blocks recomputed"], (5, 5)),
    ],
    ids=["fast link", "slow link"],
)
def test_machines_say_whether_blocks_are_recomputed_or_offloaded_first(cluster, moves, searches):
    within = wide_blocks().with_cluster(cluster)
    plan, count = solved(within, 0.75)
    assert plan is not None and tried(plan) == moves
    before, most = solved(within.with_cluster(cluster), 0.75, InGivenOrder)
    assert before is not None and before.cost == plan.cost and (count, most) == searches
    assert {*tried(plan)} < {*tried(before)}  # the cheapest was enough


def never_slower(within: Problem, part: float) -> bool:
    """Whether estimates lose nothing that predictions can tell; none fits without them, either."""
    (plan, count), (best, most) = solved(within, part), solved(within, part, EveryMove)
    assert (plan is None) == (best is None) and count <= most
    if plan is None or best is None:
        return False
    assert plan.cost.seconds <= (1 + UNCERTAINTY) * best.cost.seconds
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blocks", "wide", "residual_mlp"])
def test_no_plan_is_slower_than_with_every_move(name):
    found = []
    for cluster, part in itertools.product([FAST_LINK, SLOW_LINK], [0.8, 0.5]):
        if name == "blocks":
            within = wide_blocks().with_cluster(cluster)
        else:
            request = PlanRequest(Mesh.of([2]), cluster)
            within = state_problem(saved(name), request, BATCH, state_ratio=2.0)
        found.append(never_slower(within, part))
    assert any(found)


def staged(name: str, cluster: Cluster, part: float) -> tuple[Plan, Plan, int]:
    """The plans of a saved step in two stages without a limit, and for a part of what that stores;
    the number of searches for the second."""
    from tfpar.pipeline import Pipeline

    planner = Counting()
    search = StepSearch(saved(name), BATCH, planner, state_ratio=2.0)
    request = PlanRequest(Mesh.of([2]), cluster, pipeline=Pipeline(2, 2))
    free, _ = search(request)
    before, most = planner.searches, part * free.cost.memory_bytes
    plan, _ = search(dataclasses.replace(request, cluster=cluster.with_memory(most)))
    assert plan.cost.memory_bytes <= most
    return free, plan, planner.searches - before


def test_units_go_to_another_stage_before_slots_cross_a_slow_link():
    free, plan, searches = staged("wide", machines(1e12, 1e9, 4), 0.9)
    assert tried(plan) == ["another cut"] and searches <= 1
    assert not plan.offloaded and plan.cost.seconds <= (1 + UNCERTAINTY) * free.cost.seconds


@pytest.mark.parametrize(
    "ranks, full, most", [([[0, 1], [2, 3]], 0, 65e3), ([[0, 1], [2, 3, 4, 5]], 1, 60e3)]
)
def test_only_the_slots_of_the_stage_that_does_not_fit_are_split(ranks, full, most):
    from tfpar.pipeline import Pipeline

    search = StepSearch(saved("residual_mlp"), BATCH, find_planner("tap"), state_ratio=2.0)
    cluster = machines(1e12, 1e11, sum(map(len, ranks))).with_memory(most)
    pipeline = Pipeline(ranks=ranks, microbatches=2)
    request = PlanRequest(Mesh.of([2]), cluster, pipeline=pipeline, num_ranks=cluster.size)
    plan, _ = search(request)
    assert tried(plan) == ["shard slots"] and plan.cost.memory_bytes <= most
    split = {
        stage
        for name, stage in plan.stages.owners.items()
        if plan.layout_of(stage).variables[name].slots is not None
    }
    assert split == {full}


@pytest.mark.slow
def test_units_that_went_in_vain_go_again_with_slots_in_host_memory():
    """There no cut fits with slots on devices, nor do the slots of the first cut help enough."""
    _, plan, _ = staged("penalized", machines(1e10, 1e11, 4), 0.6)
    assert tried(plan)[-1] == "another cut" and plan.offloaded.slots


@pytest.mark.parametrize("pipeline_stages", [1, 2])
def test_a_plan_under_a_limit_tells_what_was_tried(pipeline_stages):
    from tfpar.pipeline import Pipeline

    step = saved("wide")
    pipeline = None if pipeline_stages == 1 else Pipeline(2, 2)
    mesh = Mesh.of([4 // pipeline_stages])
    search = StepSearch(step, BATCH, find_planner("tap"), state_ratio=2.0)
    free, _ = search(PlanRequest(mesh, SLOW, pipeline=pipeline))
    assert not free.findings.attempts and free.cost is not None
    most = 0.85 * free.cost.memory_bytes
    plan, _ = search(PlanRequest(mesh, SLOW.with_memory(most), pipeline=pipeline))
    assert plan.findings.attempts and plan.cost.memory_bytes <= most
    assert Plan.from_json(plan.to_json()).findings.attempts == plan.findings.attempts
    first = plan.findings.attempts[0]
    text = plan.explain("head/kernel")
    assert "Tried to make the plan fit into memory:" in text and f"{first.name}: " in text
    assert "Tried" not in free.explain("head/kernel")
