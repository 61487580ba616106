"""What a plan is to be good at, and what it may take to find it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.planning.changes import changed
from tests.planning.tiny import SMALLEST, problem
from tfpar.cost import Cost
from tfpar.pipeline import Pipeline
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.objective import Budget, Objective
from tfpar.spec import ArgumentError


@pytest.fixture(scope="module")
def asked():
    return problem(SMALLEST["a layer"](), [2])


@pytest.fixture(scope="module")
def cost(asked) -> Cost:
    return TapPlanner().solve(asked).cost


def test_the_limit_is_what_devices_have_unless_another_is_asked_for(asked, cost):
    device = asked.cluster.device.memory_bytes
    assert asked.memory_limit == device and asked.excess(cost) == 0.0
    tight = changed(asked, cluster=asked.cluster.with_memory(cost.memory_bytes - 8))
    assert tight.excess(cost) == 8.0
    assert tight.with_objective(memory_limit=math.inf).excess(cost) == 0.0
    assert tight.with_objective(memory_limit=0.0).excess(cost) == cost.memory_bytes
    assert tight.excess(None) == 0.0, "of a plan without a price nothing is known"


def test_what_is_not_asked_for_stays(asked):
    other = asked.with_objective(memory_limit=1.0).with_objective(surcharge_s=2.0)
    assert other.aim.objective == Objective(1.0, asked.aim.objective.uncertainty, 2.0)
    assert other.cluster is asked.cluster and other.memo is asked.memo


def test_plans_name_the_machines_as_they_are_whatever_is_asked_for(asked):
    plan = TapPlanner().solve(asked.with_objective(memory_limit=0.0))
    assert plan.cluster is asked.cluster


def test_a_budget_begins_when_a_search_does():
    assert Budget().start().left == math.inf
    first = Budget(100.0).start()
    assert 0 < first.left <= 100 and not first.over()
    second = Budget(100.0).start()
    assert second.left > first.left


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "soon"])
def test_a_search_takes_some_time(seconds):
    with pytest.raises(
        ArgumentError, match=r"search_seconds is .*; it must be a number of seconds"
    ):
        Budget(seconds)


def test_what_is_known_of_a_problem_holds_whatever_it_is_asked_for(asked):
    found = asked.memo.of(list)
    assert asked.with_objective(memory_limit=0.0).memo.of(list) is found
    assert asked.with_incumbent_callback(None).memo is asked.memo
    assert asked.in_pipeline(Pipeline(2, 8)).memo is asked.memo
    other = asked.with_step(state_ratio=9.0)
    assert other.memo.of(list) is not found, "another problem"
    again = other.with_settings_of(asked.with_objective(surcharge_s=1.0))
    assert again.aim.objective.surcharge_s == 1.0 and again.step.state_ratio == 9.0
    assert again.memo is other.memo


def test_a_search_for_another_objective_finds_what_a_new_one_finds():
    asked = problem(SMALLEST["a layer"](), [2])
    fresh = TapPlanner().solve(dataclasses.replace(asked).with_objective(memory_limit=0.0))
    TapPlanner().solve(asked)
    again = TapPlanner().solve(asked.with_objective(memory_limit=0.0))
    assert (again.mesh, again.variables) == (fresh.mesh, fresh.variables)
    assert again.cost == fresh.cost
