"""A search takes no longer than training can gain, whatever the clock says."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest

from tests.planning.changes import changed
from tests.planning.problems import Captured
from tests.planning.tiny import drawn
from tfpar.planning.candidates import SolvedCandidate
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.inter_op import stopping
from tfpar.planning.intra_op import gain
from tfpar.planning.intra_op.auto import AutoPlanner
from tfpar.planning.intra_op.gain import (
    LEAST_SECONDS,
    allowed_seconds,
    least_seconds,
    rhino_seconds,
)
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.objective import Budget
from tfpar.planning.request import PlanRequest


def for_steps(problem, steps, seconds=None):
    return changed(problem, budget=Budget(seconds, steps))


def stated():
    """A problem of which nothing is known."""
    return Captured.saved("wide_1000_classes").problem([1, 2], "rhino-m8")


@pytest.fixture(scope="module")
def problem():
    return stated()


@pytest.fixture(scope="module")
def model(problem):
    return FoldedModel.of(problem, 2)


@pytest.mark.slow
def test_no_plan_is_faster_than_the_bound():
    """Of small steps on machines of any kind, and of a model in a few plans."""
    for seed in range(6):
        asked = drawn(seed)
        found = TapPlanner().solve(asked).cost.seconds
        assert least_seconds(asked, FoldedModel.of(asked, 2)) <= found * (1 + 1e-9), seed
    asked = Captured.saved("mlp").problem([4], "cpu")
    bound = least_seconds(asked, FoldedModel.of(asked, 2))
    assert bound <= RhinoPlanner().solve(asked).cost.seconds


def test_what_a_search_may_take_grows_with_the_steps_and_what_they_can_save(problem, model):
    allowed = {n: allowed_seconds(for_steps(problem, n), model) for n in (1, 10**6, 2 * 10**6)}
    assert allowed[1] == LEAST_SECONDS < allowed[10**6]
    assert allowed[2 * 10**6] == pytest.approx(2 * allowed[10**6])
    saved = allowed[10**6] / 10**6
    assert 0 < saved < model_seconds(problem, model)


def model_seconds(problem, model) -> float:
    return least_seconds(problem, model) * problem.meshes[0].mesh.size


def test_what_is_not_a_matter_of_steps_takes_what_it_takes(problem, model):
    assert allowed_seconds(problem, model) == math.inf
    assert allowed_seconds(for_steps(problem, 1, seconds=60.0), model) == math.inf
    nothing_fits = for_steps(problem.with_objective(memory_limit=1.0), 1)
    assert allowed_seconds(nothing_fits, model) == math.inf


@pytest.mark.slow
def test_few_steps_are_planned_by_the_quick_planner_and_the_plan_says_so(
    problem, model, monkeypatch
):
    monkeypatch.setattr(gain, "LEAST_SECONDS", rhino_seconds(problem, model) / 2)
    planner, found = AutoPlanner(), []
    now = time.monotonic
    for slower in (1, 1000):  # a machine that takes so many times as long
        monkeypatch.setattr(time, "monotonic", lambda slower=slower: slower * now())
        found.append(planner.solve(for_steps(stated(), 1)))
    first, second = found
    assert (
        first.planner == "tap"
        and first.findings.cut_short
        and "there may be better" in first.summary()
    )
    assert first.variables == second.variables and first.cost == second.cost
    monkeypatch.setattr(time, "monotonic", now)
    long = planner.solve(for_steps(problem, 10**9))
    assert long.planner == "rhino level 3" and not long.findings.cut_short
    assert first.cost.seconds >= long.cost.seconds


def test_candidates_are_counted(problem, monkeypatch):
    """As many plans are priced as there is time for, by what one of them takes."""
    monkeypatch.setattr(gain, "LEAST_SECONDS", 5e-3)
    monkeypatch.setattr("tfpar.planning.intra_op.auto.SEARCH_SECONDS", 1e-6)  # TAP's in any case
    priced = []
    for steps in (None, 1):
        asked = stated()
        counted: list[int] = []
        asked = changed(asked, progress=lambda _, n, c=counted: c.append(n))
        plan = AutoPlanner().solve(for_steps(asked, steps))
        priced.append(max(counted))
        assert plan.findings.cut_short == (steps is not None)
    everything, few = priced
    assert few <= 5 < everything


@pytest.mark.parametrize("steps, stages", [(None, True), (10, False), (10**9, True)])
def test_stages_are_searched_where_training_can_gain_it(problem, monkeypatch, steps, stages):
    monkeypatch.setattr(stopping, "is_compute_bound", lambda *_: False)
    candidate = SolvedCandidate.of(TapPlanner().solve(problem), problem)
    mesh = problem.meshes[0].mesh
    request = PlanRequest(mesh, problem.cluster, budget=Budget(steps=steps))
    assert stopping.needs_no_stages(candidate, request) != stages
    patient = dataclasses.replace(request, budget=Budget(60.0, steps))
    assert not stopping.needs_no_stages(candidate, patient)
