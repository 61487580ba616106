"""Ctrl-C in a search: it ends at once, and the best plan so far is used if one is asked for."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time

import pytest

from tests.planning.changes import changed
from tests.planning.intra_op.rhino.test_cost_network import hard
from tests.planning.problems import Captured, assert_priced_as_a_whole
from tests.planning.test_cache import problem as tiny
from tests.time_limits import time_limit
from tfpar.planning.cache import PlanCache
from tfpar.planning.deadline import Deadline
from tfpar.planning.incumbent import Incumbent, SearchInterrupted
from tfpar.planning.intra_op.rhino import RhinoPlanner, ilp
from tfpar.planning.intra_op.rhino.branch_and_bound import side_by_side
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.memory.peak_model import PeakMemoryModel
from tfpar.planning.pricing.price import price_plan
from tfpar.planning.solve import find_plan
from tfpar.planning.solver import PROGRAM_SECONDS, SolverResult, SolveStatus, minimise, minimise_or

AT_ONCE_S = time_limit(1)


@pytest.fixture(autouse=True)
def python_handles_it():
    """As in a script: Ctrl-C raises KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted:
    """A planner whose search Ctrl-C comes in, once it was told so often of a plan."""

    name = "interrupted"

    def __init__(self, planner, after: int) -> None:
        self.planner, self.after, self.searches = planner, after, 0

    def solve(self, problem):
        self.searches += 1
        told = problem.aim.offer

        def offer(make, cost):
            told(make, cost)
            self.after -= 1
            if self.after == 0:
                self.at = time.monotonic()
                signal.raise_signal(signal.SIGINT)

        return self.planner.solve(changed(problem, offer=offer))


@pytest.fixture(scope="module")
def captured():
    return Captured.saved("mlp")


# --- what is kept -----------------------------------------------------------------------------


def test_the_fastest_that_fits_is_kept_and_made_only_when_asked_for():
    best, so_far = (
        TapPlanner().solve(tiny()),
        Incumbent(lambda cost: max(0.0, cost.memory_bytes - 100)),
    )
    costs = {
        name: dataclasses.replace(
            best.cost, seconds=seconds, weight_bytes=num_bytes, state_bytes=0.0, live_bytes=0.0
        )
        for name, seconds, num_bytes in [
            ("large", 1.0, 200.0),
            ("larger", 0.5, 300.0),
            ("slow", 9.0, 50.0),
            ("fast", 2.0, 90.0),
        ]
    }
    made = []

    def offer(name, cost=None):
        so_far.report_incumbent(lambda: made.append(name), cost)

    assert so_far.plan() is None
    for name, kept in [
        ("unknown", "unknown"),
        ("larger", "larger"),
        ("large", "large"),
        ("slow", "slow"),
        ("fast", "fast"),
    ]:
        offer(name, costs.get(name))
        so_far.plan()
        assert made[-1] == kept
    for name in ("unknown", *costs):
        offer(name, costs.get(name))
    so_far.plan()
    assert made == ["unknown", "larger", "large", "slow", "fast", "fast"]


def test_what_fits_in_microbatches_is_kept_though_it_would_not_in_one_piece(captured):
    problem = captured.problem([2, 2], "v100-ethernet")
    cost = TapPlanner().solve(problem).cost
    parts = changed(problem, microbatches=4, kept_part=0.25)
    stored = parts.stored_bytes(cost, PeakMemoryModel.of(cost))
    asked = parts.with_objective(memory_limit=(stored + cost.memory_bytes) / 2)
    assert asked.excess(cost) and not asked.excess_in_parts(cost)

    class Once(TapPlanner):
        def solve(self, problem):
            found = super().solve(problem.with_objective(memory_limit=math.inf))
            problem.aim.offer(lambda: found, found.cost)
            raise KeyboardInterrupt

    with pytest.raises(SearchInterrupted) as error:
        find_plan(asked, Once())
    plan = error.value.plan
    assert plan.findings.cut_short and plan.microbatches == 4
    assert plan.cost == price_plan(plan, asked, asked.cluster).cost


@pytest.mark.parametrize(
    "planner, after",
    [
        (TapPlanner(), 1),
        (TapPlanner(), 3),
        (RhinoPlanner(level=2), 1),
        pytest.param(RhinoPlanner(level=2), 2, marks=pytest.mark.nightly),
        pytest.param(RhinoPlanner(level=3), 3, marks=pytest.mark.slow),
    ],
    ids=["tap-1", "tap-3", "rhino-2-1", "rhino-2-2", "rhino-3-3"],
)
def test_what_was_found_is_used_if_a_plan_is_asked_for_again(captured, planner, after, caplog):
    problem = captured.problem([2, 2], "v100-ethernet")
    asked, kept = Interrupted(planner, after), {}
    with pytest.raises(KeyboardInterrupt) as error:
        find_plan(problem, asked, interrupted=kept)
    assert time.monotonic() - asked.at < AT_ONCE_S and not caplog.messages
    plan = find_plan(problem, asked, interrupted=kept)
    assert asked.searches == 1 and plan is error.value.plan
    assert plan.findings.cut_short and "there may be better" in plan.summary()
    assert_priced_as_a_whole(problem, plan)
    (line,) = caplog.messages
    assert "interrupted before: the best plan that it had found is used" in line
    best = find_plan(problem, asked)
    assert asked.searches == 2 and not best.findings.cut_short
    assert best.cost.seconds <= plan.cost.seconds * 1.0001


def test_of_another_problem_nothing_is_known(captured):
    asked, kept = Interrupted(TapPlanner(), 1), {}
    with pytest.raises(KeyboardInterrupt):
        find_plan(captured.problem([2, 2], "v100-ethernet"), asked, interrupted=kept)
    plan = find_plan(captured.problem([2, 2], "dgx-a100"), asked, interrupted=kept)
    assert asked.searches == 2 and not plan.findings.cut_short


def test_where_nothing_was_found_or_fits_the_search_begins_anew(captured):
    problem, kept = captured.problem([2, 2], "v100-ethernet"), {}

    class AtOnce(Interrupted):
        def solve(self, problem):
            if not self.searches:
                self.searches += 1
                raise KeyboardInterrupt
            return super().solve(problem)

    asked = AtOnce(TapPlanner(), 0)
    with pytest.raises(SearchInterrupted) as error:
        find_plan(problem, asked, interrupted=kept)
    assert error.value.plan is None
    assert (
        not find_plan(problem, asked, interrupted=kept).findings.cut_short and asked.searches == 2
    )
    tight = changed(problem, cluster=problem.cluster.with_memory(1.03e6))
    with pytest.raises(SearchInterrupted) as error:
        find_plan(tight, Interrupted(TapPlanner(), 1))
    assert error.value.plan is None


def test_a_plan_says_what_it_computes_again(captured):
    problem = changed(captured.problem([2, 2], "v100-ethernet"), recompute=("stem",))
    with pytest.raises(SearchInterrupted) as error:
        find_plan(problem, Interrupted(TapPlanner(), 1))
    assert error.value.plan.recompute


# --- at once ----------------------------------------------------------------------------------


class Solving:
    """A search that is in the solver for longer than anyone waits."""

    entered = threading.Event()

    def run(self, deadline):
        self.entered.set()
        return ilp.solve_network(hard(), deadline)


@pytest.mark.slow
def test_the_solver_does_not_keep_a_search_from_ending():
    def interrupt():
        Solving.entered.wait(60)
        time.sleep(1.0)
        seen.append(time.monotonic())
        signal.raise_signal(signal.SIGINT)

    seen, deadline, before = [], Deadline(), set(threading.enumerate())
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        side_by_side([Solving().run], deadline)
    assert time.monotonic() - seen[0] < AT_ONCE_S
    assert deadline.stopped
    for thread in set(threading.enumerate()) - before:
        thread.join(PROGRAM_SECONDS / 2)
        assert not thread.is_alive(), "the solver runs on"


def test_one_search_that_fails_ends_the_others():
    class Failing:
        def run(self, deadline):
            raise ValueError("no such thing")

    class Waiting:
        def run(self, deadline):
            while True:
                deadline.over()
                time.sleep(0.01)

    deadline = Deadline()
    with pytest.raises(ValueError, match="no such thing"):
        side_by_side([Waiting().run, Failing().run], deadline)
    assert deadline.stopped


# --- programs that are stopped ----------------------------------------------------------------


@pytest.fixture
def leaves(monkeypatch):
    """Gives solvers a gap that they leave, of programs and of their relaxations."""

    def leave(gap):
        def one(program, deadline):
            return dataclasses.replace(minimise(program, deadline), gap=gap)

        def several(program, beside, deadline):
            found = minimise_or(program, beside, deadline)
            return [dataclasses.replace(answer, gap=gap) for answer in found]

        monkeypatch.setattr(ilp, "minimise", one)
        monkeypatch.setattr(ilp, "minimise_or", several)

    return leave


def test_a_program_that_is_stopped_marks_the_plan(leaves, tmp_path):
    assert not RhinoPlanner().solve(tiny()).findings.cut_short
    leaves(0.5)
    plan = find_plan(tiny(), RhinoPlanner(), PlanCache(str(tmp_path)))
    assert plan.findings.cut_short and "there may be better" in plan.summary()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gap", [0.0, 0.5])
def test_a_deadline_knows_of_programs_that_were_stopped(leaves, gap):
    leaves(gap)
    deadline = Deadline()
    ilp.solve_network(hard(nodes=2), deadline)
    assert deadline.cut_short == (gap > 0) and not deadline.over()
    assert deadline.left == math.inf


def test_a_program_without_a_solution_in_time_marks_the_plan(monkeypatch):
    nothing = SolverResult(SolveStatus.NONE_IN_TIME)
    monkeypatch.setattr(ilp, "minimise", lambda program, deadline: nothing)
    monkeypatch.setattr(ilp, "minimise_or", lambda program, beside, deadline: [nothing])
    assert RhinoPlanner().solve(tiny()).findings.cut_short
