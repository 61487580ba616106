"""Searches that may take only so long: the best plan by then, and nothing that a cache keeps."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

import tfpar as tap
from tests.planning.problems import Captured, assert_priced_as_a_whole, laid, within
from tests.planning.test_cache import problem as tiny
from tfpar.planning import deadline
from tfpar.planning.cache import PlanCache
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.intra_op.tap import mesh_search
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.intra_op.tap.routing import Routing
from tfpar.planning.intra_op.tie_breaking import baselines
from tfpar.planning.memory.limit import solve_under_memory_limit
from tfpar.planning.objective import Budget
from tfpar.planning.solve import find_plan
from tfpar.plans import Plan
from tfpar.spec import PlanError, Shard, TfparError, TimeLimitError


@pytest.fixture
def ticking(monkeypatch):
    """A second passes whenever the time is asked for: searches end at the same place each time."""

    class Clock:
        monotonic = itertools.count().__next__

    monkeypatch.setattr(deadline, "time", Clock)


@pytest.fixture(scope="module")
def captured():
    return Captured.saved("mlp")


def test_a_deadline_knows_what_it_left_out(ticking):
    end = Deadline(2.5)
    assert not end.over() and not end.cut_short
    end.over()
    assert not end.cut_short
    assert end.over() and end.cut_short and end.left < 0
    never = Deadline()
    assert never.left == np.inf and not never.over()


def split_weights(plan):
    return [
        n for n, v in plan.variables.items() if v.spec and any(isinstance(p, Shard) for p in v.spec)
    ]


@pytest.mark.slow
def test_more_time_finds_better_plans_and_the_first_needs_no_search(captured, ticking):
    problem = captured.problem([2, 2], "cpu")
    plain = baselines(problem, FoldedModel.of(problem, 2))
    whole = TapPlanner()
    best = whole.solve(problem)
    plans, priced = [], []
    for seconds in (0.5, 6.0, 25.0, 1e6):
        planner = TapPlanner()
        asked = captured.problem([2, 2], "cpu")  # of which nothing is known from searches before
        plans.append(planner.solve(within(seconds, asked)))
        priced.append(planner.statistics.candidates)
        assert_priced_as_a_whole(problem, plans[-1])
    assert [p.findings.cut_short for p in plans] == [True, True, True, False]
    assert (
        priced == sorted(set(priced))
        and priced[0] == 1
        and priced[-1] == whole.statistics.candidates
    )
    assert split_weights(plans[0]) == []
    times = [p.cost.seconds for p in plans]
    assert times[0] == pytest.approx(min(b.cost.seconds for b in plain))
    assert times == sorted(times, reverse=True) and times[0] > times[-1] == best.cost.seconds


def test_under_constraints_the_first_candidate_holds_to_them(captured, ticking):
    constraints = [tap.batch("data"), tap.shard("head/kernel", 1, "model")]
    problem = captured.problem([2, 2], "v100-ethernet", constraints)
    plan = TapPlanner().solve(within(0.5, problem))
    assert plan.findings.cut_short and laid(plan, "head/kernel") == {"R,S(1)"}
    assert_priced_as_a_whole(problem, plan)


def test_where_no_plan_was_found_in_time_constraints_are_not_to_blame(captured, monkeypatch):
    monkeypatch.setattr(mesh_search, "pattern_routing", lambda *_: Routing(False, "broken"))
    problem = captured.problem([2, 2], "v100-ethernet")
    with pytest.raises(TimeLimitError, match="in time. Give the search more search_seconds"):
        TapPlanner().solve(within(1e-9, problem))
    with pytest.raises(PlanError, match="No plan is valid .*: broken") as error:
        TapPlanner().solve(problem)
    assert not isinstance(error.value, TimeLimitError)


# --- what is kept ------------------------------------------------------------------------


@pytest.mark.parametrize("planner", [TapPlanner, RhinoPlanner])
def test_a_plan_that_was_cut_short_is_not_kept_and_a_whole_search_serves_all(planner, tmp_path):
    cache, hurried = PlanCache(str(tmp_path)), within(1e-9, tiny())
    assert find_plan(hurried, planner(), cache).findings.cut_short
    assert os.listdir(tmp_path) == []
    best = find_plan(tiny(), planner(), cache)
    assert not best.findings.cut_short and len(list(tmp_path.glob("*.json"))) == 1
    assert find_plan(hurried, planner(), cache) == best


@pytest.mark.parametrize("which", range(3))
def test_one_search_of_several_that_was_cut_short_marks_the_plan(which):
    """Where memory is short: the fastest, one that fits, and the one that stores least."""

    class Planner:
        name, searches = "stub", 0

        def solve(self, problem):
            at, self.searches = self.searches, self.searches + 1
            return TapPlanner().solve(problem).with_findings(cut_short=at == which)

    problem = tiny()
    problem = problem.with_cluster(problem.cluster.with_memory(1.0))
    planner = Planner()
    assert solve_under_memory_limit(problem, planner).findings.cut_short and planner.searches == 3


def test_files_and_summaries_say_that_a_plan_was_cut_short():
    plan = TapPlanner().solve(within(1e-9, tiny()))
    assert (
        Plan.from_json(plan.to_json()).findings.cut_short
        and "there may be better" in plan.summary()
    )
    whole = TapPlanner().solve(tiny())
    assert (
        not Plan.from_json(whole.to_json()).findings.cut_short and "better" not in whole.summary()
    )


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_search_takes_some_time(seconds):
    with pytest.raises(
        TfparError, match=f"search_seconds is {seconds}; it must be a number of seconds"
    ):
        Budget(seconds)
