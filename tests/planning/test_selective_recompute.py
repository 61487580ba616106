"""Blocks of which all but products with weights is recomputed, as a move of the memory loop."""

from __future__ import annotations

import pytest

from tests.planning.problems import Captured
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.memory.limit import solve_under_memory_limit
from tfpar.planning.memory.move_estimates import activation_bytes, least_step_seconds
from tfpar.planning.memory.recompute import Blocks, is_selective, recomputed_problem
from tfpar.spec import SpecError


@pytest.fixture(scope="module")
def problem():
    return Captured.saved("gpt").problem({"data": 2}, "dgx-a100")


@pytest.fixture(scope="module")
def blocks(problem):
    return Blocks.of(problem.step.graph)


def test_patterns_choose_whole_blocks_before_selective_ones(blocks):
    assert blocks.recomputed(["selective"]) == ("block_0/selective", "block_1/selective")
    assert blocks.recomputed(["block_1/selective"]) == ("block_1/selective",)
    assert blocks.recomputed(["block_.*"]) == blocks.recomputed(True) == ("block_0", "block_1")
    with pytest.raises(SpecError, match="matches no block"):
        blocks.chosen(["selective"], "offload=")


def test_they_store_more_than_whole_blocks_and_take_less_time(problem, blocks):
    steps = [
        recomputed_problem(problem, names)
        for names in ((), tuple(blocks.selective), tuple(blocks.ops))
    ]
    none, some, whole = map(activation_bytes, steps)
    assert whole < some < 0.7 * none
    none, some, whole = map(least_step_seconds, steps)
    assert none < some < whole


def test_where_memory_is_a_little_short_they_are_enough():
    problem = Captured.saved("gpt").problem({"data": 1}, "dgx-a100")
    free = solve_under_memory_limit(problem, TapPlanner())
    tight = problem.with_objective(memory_limit=0.8 * free.cost.memory_bytes)
    plan = solve_under_memory_limit(tight, TapPlanner())
    assert plan.cost.memory_bytes <= 0.8 * free.cost.memory_bytes
    tried = {attempt.name for attempt in plan.findings.attempts}
    assert any("selectively" in name for name in tried)
    assert not plan.recompute or all(map(is_selective, plan.recompute))
