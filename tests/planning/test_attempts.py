"""Searches for a step in microbatches that turns out to store more than was expected."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.planning.problems import Captured
from tfpar.planning import solve
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.memory.peak_model import PeakMemoryModel
from tfpar.spec import MemoryLimitError


class Listening(TapPlanner):
    """Writes down the limits that it is asked to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[float] = []

    def solve(self, problem):
        self.limits.append(problem.memory_limit)
        return super().solve(problem)


def test_the_next_limit_is_as_much_below_what_was_expected_as_that_was_exceeded(monkeypatch):
    problem = Captured.saved("mlp").problem([2, 2], "v100-ethernet")
    problem = problem.with_batch(microbatches=4, kept_part=0.25)
    cost = TapPlanner().solve(problem.with_objective(memory_limit=math.inf)).cost
    expected = problem.stored_bytes(cost, PeakMemoryModel.of(cost))

    def four_times_as_much(plan, *_):
        more = dataclasses.replace(plan.cost, weight_bytes=4 * expected, state_bytes=0.0)
        return plan.with_findings(cost=dataclasses.replace(more, live_bytes=0.0))

    monkeypatch.setattr(solve, "price_in_microbatches", four_times_as_much)
    planner = Listening()
    with pytest.raises(MemoryLimitError):
        solve.find_plan(problem.with_objective(memory_limit=2 * expected), planner)
    fastest, *others = planner.limits
    assert fastest == math.inf and others[0] == pytest.approx(expected / 2)
    assert others[1] < others[0], "what was found for that is a quarter of what it turns out to be"
