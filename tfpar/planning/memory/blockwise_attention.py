"""Attention on blocks of its scores (see `ir.passes.fuse_attention`), as a transform of a
problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tfpar.ir.graph import Graph
from tfpar.ir.passes.fuse_attention import fuse_attention
from tfpar.planning.memory.fit import MemoryFit, MemoryMove, MoveEstimate
from tfpar.planning.memory.move_estimates import estimate_change
from tfpar.planning.memory.recompute import with_changed_graph
from tfpar.planning.problem import Problem
from tfpar.plans import Plan
from tfpar.plans.attention import AttentionMode


@dataclasses.dataclass(frozen=True)
class AttentionOnBlocks:
    """A move with attention on blocks.

    Attributes:
        problem: of the step as it is; `blocks`: with attention on blocks.
        move: on `blocks`.
    """

    problem: Problem
    blocks: Problem
    move: MemoryMove

    @property
    def name(self) -> str:
        return f"{self.move.name}, attention on blocks"

    def estimate(self, fit: MemoryFit) -> MoveEstimate:
        """Estimate what the dearer of both adds for each byte."""
        own = estimate_change(self.problem, self.blocks)
        other = self.move.estimate(fit)
        return MoveEstimate(*map(max, own, other))

    def plans(self, fit: MemoryFit) -> Iterator[Plan]:
        return self.move.plans(fit)


def problem_with_attention(problem: Problem, attention: AttentionMode | None) -> Problem:
    """Return the problem of the step whose attentions run so."""
    return blockwise_problem(problem) if attention == "blockwise" else problem


def blockwise_problem(problem: Problem) -> Problem:
    """Return the problem of the step whose attentions work on blocks; `problem` itself if it has
    none. It keeps its fingerprint: that of the step."""
    known, before = problem.step.graph_memo.of(BlockwiseGraphs), problem.step.graph
    if before not in known:
        made = fuse_attention(before)
        known[before] = known[made] = made
    if known[before] is before:
        return problem
    problems = problem.memo.of(BlockwiseProblems)
    if before not in problems:
        changed = with_changed_graph(problem, known[before])
        problems[before] = changed.with_step(attention="blockwise")
    return problems[before].with_settings_of(problem)


class BlockwiseGraphs(dict[Graph, Graph]):
    """Graphs whose attentions work on blocks, by the graph before."""


class BlockwiseProblems(dict[Graph, Problem]):
    """Problems whose attentions work on blocks, by the graph before."""
