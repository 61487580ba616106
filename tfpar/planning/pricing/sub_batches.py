"""Planned step for pricing, with the batch of a rank in sub-batches: chunks or microbatches."""

from __future__ import annotations

import dataclasses

from tfpar.compile.local.batch_statistics import statistics_of
from tfpar.compile.local.chunks import split_batch
from tfpar.ir.roles import Roles
from tfpar.pipeline.statistics import EXACT, BatchStatistics
from tfpar.planning.problem import Problem, step_anchors
from tfpar.plans import Plan
from tfpar.propagation.partitioned_graph import Anchors, PartitionedGraph


@dataclasses.dataclass(frozen=True, eq=False)
class SubBatchStep:
    """A step under a plan.

    Attributes:
        whole: the step in one piece, from `anchors`.
        roles: of its ops.
    """

    problem: Problem
    anchors: Anchors
    whole: PartitionedGraph
    roles: Roles

    @classmethod
    def of(
        cls, plan: Plan, problem: Problem, whole: PartitionedGraph, roles: Roles
    ) -> SubBatchStep:
        """Return the problem's step under `plan`."""
        return cls(problem, step_anchors(plan, problem), whole, roles)

    def cut(self, parts: int) -> PartitionedGraph:
        """Return the step on the mesh with an axis of so many parts behind its own."""
        return split_batch(self.whole, self.anchors, self.problem.step.batched, parts)

    def statistics(self, cut: PartitionedGraph) -> BatchStatistics:
        """Find the statistics of the batch that each microbatch has of its own.

        Args:
            cut: the step in microbatches.
        """
        if self.problem.batch.batch_statistics == "exact" or cut.mesh.shape[-1] == 1:
            return EXACT
        return statistics_of(cut, self.roles)
