"""A planned step with the batch of a rank in parts, chunks or microbatches: what is priced."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from tfpar.ir.graph import Tensor
from tfpar.ir.roles import BACKWARD, Roles
from tfpar.pipeline.statistics import EXACT, BatchStatistics
from tfpar.plans import Plan
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import Anchors, PartitionedGraph
from tfpar.propagation.prepared import prepare
from tfpar.rewrite.batch_statistics import statistics_of
from tfpar.rewrite.chunks import cut_in_parts
from tfpar.search.problem import Problem


@dataclasses.dataclass(frozen=True, eq=False)
class StepInParts:
    """A training step under a plan.

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
        cls, plan: Plan, problem: Problem, anchors: Anchors, whole: Collection[Tensor] = ()
    ) -> StepInParts | None:
        """The problem's step under `plan`; None if it does not train.

        Args:
            anchors: what `plan` fixes of the problem's graph.
            whole: see `propagation.prepare`.
        """
        prepared = prepare(
            problem.graph, whole=whole
        )  # which has ops of its own: roles are those of its graph
        roles = Roles.of(
            prepared.graph,
            times=dict.fromkeys(problem.stand_ins, 0),
            compression=problem.compression,
            jit_compile=problem.jit_compile,
        )
        if BACKWARD not in roles.phase.values():
            return None
        return cls(problem, anchors, propagate(prepared, plan.mesh, anchors), roles)

    def cut(self, parts: int) -> PartitionedGraph:
        """The step on the mesh with an axis of so many parts behind its own."""
        return cut_in_parts(self.whole, self.anchors, self.problem.batched, parts)

    def statistics(self, cut: PartitionedGraph) -> BatchStatistics:
        """Of the batch, those that each microbatch has of its own.

        Args:
            cut: the step in microbatches.
        """
        if self.problem.batch_statistics == "exact" or cut.mesh.shape[-1] == 1:
            return EXACT
        return statistics_of(cut, self.roles)
