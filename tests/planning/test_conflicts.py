"""Constraints under which there is no plan: the fewest that conflict, the cheapest to relax."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest

import tfpar as tap
from tests.planning.changes import changed
from tests.planning.problems import Captured, within
from tests.planning.test_cache import problem as tiny
from tfpar.cluster import find_cluster
from tfpar.planning import conflicts, deadline
from tfpar.planning.conflicts import conflict_error, find_conflict
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.meshes import given_mesh
from tfpar.planning.request import PlanRequest
from tfpar.planning.solve import find_plan
from tfpar.planning.step_search import StepSearch
from tfpar.plans import Plan
from tfpar.spec import (
    MemoryLimitError,
    Mesh,
    PlanError,
    SpecError,
    TimeLimitError,
    format_bytes,
    format_seconds,
)

NAMES = ("a", "b", "c", "d", "e")


@functools.cache
def priced() -> Plan:
    return TapPlanner().solve(tiny())


class Stub:
    """Searches under constraints of which some sets have no plan; what is kept makes it slower.

    Without any, the best plan is on another mesh.

    Args:
        bad: sets of constraints that no plan satisfies.
        seconds: what a step takes for each constraint that is kept.
    """

    def __init__(self, *bad: str, seconds=(), error: type[PlanError] = PlanError) -> None:
        self.bad, self.error = [set(names) for names in bad], error
        self.seconds = dict(seconds)
        self.asked: list[tuple[str, ...]] = []

    def relaxed(self, kept):
        names = tuple(n for n in NAMES if n in kept)
        meshes = [given_mesh(priced().mesh, ["data"])]
        return tiny().with_meshes(meshes).with_given(constraints=names)

    def solve(self, problem):
        self.asked.append(problem.given.constraints)
        if any(names <= set(problem.given.constraints) for names in self.bad):
            raise self.error("impossible")
        seconds = 1.0 + sum(self.seconds.get(name, 0.0) for name in problem.given.constraints)
        plan = priced()
        if not problem.given.constraints:
            plan = dataclasses.replace(plan, mesh=Mesh(("data", "model"), (4, 1)))
        return plan.with_findings(cost=dataclasses.replace(plan.cost, seconds=seconds))

    def conflict(self, constraints=NAMES, seconds=None):
        problem = self.relaxed(constraints)
        return find_conflict(within(seconds, problem), self.relaxed, self.solve)


PAIRS = list(itertools.combinations(["a", "b", "ce", "bd", "acd", "abcde"], 2))


@pytest.mark.parametrize("bad", [("a",), ("ce",), ("abcde",), *PAIRS], ids="+".join)
def test_a_smallest_set_is_found_with_few_searches(bad):
    stub = Stub(*bad, seconds=dict.fromkeys(NAMES, 1.0))
    found = stub.conflict()
    assert "".join(found.constraints) in bad and found.is_irreducible
    assert len(stub.asked) == len(set(stub.asked)) <= 3 * len(NAMES) + 1
    assert len(stub.asked) <= 2 * len(NAMES) + 1 or len(next(iter(found.ways))) > 1
    # Where others conflict too, one of them may not be enough to leave out.
    enough = {(name,) for name in found.constraints if all(name in names for names in bad)}
    if enough:
        assert set(found.ways) == enough
    else:
        ((left, plan),) = found.ways.items()
        assert len(left) == 2 and all(set(left) & set(names) for names in bad)
        assert plan.cost.seconds == pytest.approx(1.0 + len(set(NAMES) - set(left)))


def test_what_is_fastest_to_relax_is_named_first_and_all_others_are_kept():
    stub = Stub("bd", seconds={"a": 8.0, "b": 1.0, "c": 2.0, "d": 4.0})
    found = stub.conflict()
    assert [(n, p.cost.seconds) for n, p in found.ways.items()] == [(("d",), 12.0), (("b",), 15.0)]
    text = str(conflict_error(found, PlanError("impossible"), stub.relaxed(NAMES)))
    stored = format_bytes(priced().cost.memory_bytes)
    assert text == (
        f"No plan satisfies these constraints together: b; d. Leave out d: the best plan then "
        f"stores {stored} and takes 12.00 s a step (the cheapest); without b it stores {stored} "
        f"and takes 15.00 s a step. The planner says: impossible"
    )


def test_constraints_are_not_to_blame_where_there_is_no_plan_without():
    stub = Stub("")
    assert stub.conflict() is None and stub.asked == [()]
    assert Stub("").conflict(()) is None


def test_a_plan_that_a_planner_misses_without_a_constraint_is_one_all_the_same():
    stub = Stub("bd")
    solve = stub.solve
    missing = ("b", "e")

    def misses(problem):
        if problem.given.constraints == missing:
            raise PlanError("missed")
        return solve(problem)

    stub.solve = misses
    assert stub.conflict().constraints == ("b", "d")


def test_one_constraint_takes_one_search():
    stub = Stub("b")
    found = stub.conflict("b")
    assert found.constraints == ("b",) and stub.asked == [()]
    assert str(found).startswith("this constraint: b. Leave out b: the best plan then stores")


def test_where_several_sets_conflict_several_are_left_out():
    found = Stub("ab", "cd", seconds={"e": 1.0}).conflict()
    assert found.constraints == ("c", "d") and list(found.ways) == [("b", "d")]
    assert "enough to leave out. Leave out b; d: the best plan then stores" in str(found)
    none_left = Stub("a", "b").conflict("ab")
    assert list(none_left.ways) == [("a", "b")]
    assert str(none_left).endswith(" and takes 1.00 s a step, on data=4 x model=1.")


def test_a_constraint_that_is_given_twice_is_one():
    stub = Stub("b")
    problem = changed(stub.relaxed(NAMES), constraints=("b", "a", "b"))
    found = find_conflict(problem, stub.relaxed, stub.solve)
    assert found.constraints == ("b",) and list(found.ways) == [("b",)]


def test_patterns_that_contradict_without_an_exact_path_are_no_way_out():
    """The path itself wins over patterns; without it, they are what contradicts."""
    stub = Stub("ab")

    def relaxed(kept):
        if "a" not in kept and "b" in kept:
            raise SpecError("contradict")
        return stub.relaxed(kept)

    found = find_conflict(stub.relaxed(NAMES), relaxed, stub.solve)
    assert found.constraints == ("b",) and list(found.ways) == [("b",)]


# --- time ------------------------------------------------------------------------------


@pytest.mark.parametrize("most", range(1, 9))
def test_when_time_is_over_what_was_not_tried_stays_and_that_is_said(most, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(deadline, "time", type("Clock", (), {"monotonic": lambda: now[0]}))
    stub = Stub("bd")

    def solve(problem):
        now[0] += 1.0
        return stub.solve(problem)

    found = find_conflict(within(most - 0.5, stub.relaxed(NAMES)), stub.relaxed, solve)
    assert len(stub.asked) == min(most, 8)
    assert {"b", "d"} <= set(found.constraints)
    assert found.is_irreducible == (most >= 8) == (found.constraints == ("b", "d"))
    assert ("no time to find out" in str(found)) != found.is_irreducible


def test_a_search_that_was_cut_short_shows_nothing():
    """That it finds no plan does not make the constraint that it was made without a bystander."""
    whole, hurried = Stub("b").conflict("ab"), Stub("b", error=TimeLimitError).conflict("ab")
    assert whole.constraints == ("b",) and whole.is_irreducible
    assert hurried.constraints == ("a", "b") and not hurried.is_irreducible
    assert list(hurried.ways) == [("b",)]


def test_one_search_without_an_answer_is_enough_for_doubt():
    stub = Stub("b")

    def solve(problem):
        if problem.given.constraints == ("b", "c"):
            raise TimeLimitError("no time")
        return stub.solve(problem)

    found = find_conflict(stub.relaxed("abc"), stub.relaxed, solve)
    assert found.constraints == ("a", "b") and not found.is_irreducible


def test_a_search_says_what_it_is_for():
    told = []
    stub = Stub("bd")

    def solve(problem):
        problem.aim.progress("data=4", 7)
        return stub.solve(problem)

    progress = lambda what, count: told.append((what, count))  # noqa: E731
    relaxed = lambda kept: changed(stub.relaxed(kept), progress=progress)  # noqa: E731
    find_conflict(relaxed(NAMES), relaxed, solve)
    assert len(told) == 2 * len(stub.asked)
    assert told[0] == ("which constraints conflict, search 1", 0)
    assert told[3] == ("which constraints conflict, search 2, data=4", 7)


# --- planners --------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However busy the machine is, sets are smallest ones."""
    monkeypatch.setattr(conflicts, "CONFLICT_SECONDS", 1e6)


STEM, HEAD = tap.replicate("stem/kernel"), tap.replicate("head/kernel")
OTHER = tap.shard("narrow/kernel", 1, "model")
ALL = (STEM, OTHER, HEAD)
MESH = Mesh.of([1, 2])
PLANNERS = pytest.mark.parametrize("planner", [TapPlanner(), RhinoPlanner()], ids=["tap", "rhino"])


@pytest.fixture(scope="module")
def captured():
    return Captured.saved("three_layers")


def cluster(limit):
    return find_cluster("v100-ethernet", MESH).with_memory(limit)


def search(captured, planner, constraints, limit):
    request = PlanRequest(MESH, cluster(limit), tuple(constraints))
    plan, _ = StepSearch(captured.step, captured.batch, planner, state_ratio=2.0)(request)
    return plan


def least(captured, planner, constraints):
    """The bytes that the plan stores which stores least under `constraints`."""
    limit = 1.0  # no room for the weights, and then for these alone
    for _ in range(2):
        with pytest.raises(MemoryLimitError) as error:
            find_plan(captured.problem(MESH.shape, cluster(limit), constraints), planner)
        limit = error.value.needed_bytes
    return limit


@pytest.mark.parametrize(
    "planner",
    [
        pytest.param(TapPlanner(), id="tap"),
        pytest.param(RhinoPlanner(), id="rhino", marks=pytest.mark.slow),
    ],
)
def test_constraints_under_which_nothing_fits_are_named_and_those_that_do_not_matter_are_not(
    planner, captured
):
    both = least(captured, planner, ALL)
    one = max(least(captured, planner, given) for given in ((OTHER, HEAD), (STEM, OTHER)))
    limit = (both + one) / 2
    assert one < limit < both
    with pytest.raises(MemoryLimitError) as error:
        search(captured, planner, ALL, limit)
    text = str(error.value)
    assert error.value.needed_bytes == both
    start = f"No plan fits into {format_bytes(limit)} under these constraints together: "
    assert text.startswith(f"{start}{STEM}; {HEAD}. Leave out ") and str(OTHER) not in text
    # What is said of each is what is found without it.
    plans = {left: search(captured, planner, set(ALL) - {left}, limit) for left in (STEM, HEAD)}
    for plan in plans.values():
        stored, seconds = format_bytes(plan.cost.memory_bytes), plan.cost.seconds
        assert f"stores {stored} and takes {format_seconds(seconds)} a step" in text
    cheapest = min(plans, key=lambda left: plans[left].cost.seconds)
    assert f"Leave out {cheapest}: " in text and text.count("(the cheapest)") == 1


@PLANNERS
def test_where_nothing_fits_in_any_case_constraints_are_not_blamed(planner, captured):
    with pytest.raises(MemoryLimitError, match="What would help: more devices") as error:
        search(captured, planner, [HEAD], 1e5)
    assert "Leave out" not in str(error.value)
