"""Which ops a plan has to name: those that would not run as it wants by themselves.

A planner decides every op; propagation, given the variables and a few of these decisions, comes to
most of the others by itself. A plan that holds only what is needed can be read, and says more for a
step of another batch size.
"""

from __future__ import annotations

import dataclasses

from tfpar.ir.graph import Op
from tfpar.propagation.decide import FREE
from tfpar.propagation.engine import HoldWhole, Propagation
from tfpar.propagation.partitioned import Anchors, OpPlan, PartitionedGraph
from tfpar.propagation.planned import run_as_planned
from tfpar.propagation.prepared import PreparedGraph
from tfpar.spec import Mesh


def needed_ops(
    prepared: PreparedGraph, mesh: Mesh, anchors: Anchors
) -> tuple[dict[str, OpPlan], PartitionedGraph]:
    """The part of `anchors.ops` that propagation would not come to, and what comes of it."""
    whole: frozenset[tuple[Op, int]] = frozenset()
    while True:  # as `propagate` does
        run = _Comparing(prepared, mesh, anchors, whole)
        try:
            laid = run.run()
            return run.needed, laid
        except HoldWhole as error:
            whole |= error.ops


class _Comparing(Propagation):
    def __init__(
        self, prepared: PreparedGraph, mesh: Mesh, anchors: Anchors,
        whole: frozenset[tuple[Op, int]],
    ) -> None:  # fmt: skip
        free = dataclasses.replace(anchors, ops={})
        super().__init__(prepared, mesh, free, False, frozenset(), whole)
        self.wanted = anchors.ops
        self.needed: dict[str, OpPlan] = {}

    def visit(self, op: Op) -> None:
        planned = self.wanted.get(op.name)
        if planned is not None and not self._runs_so(op, planned):
            if run_as_planned(self, op, planned):
                self.needed[op.name] = planned
                return
        super().visit(op)

    def _runs_so(self, op: Op, planned: OpPlan) -> bool:
        """Whether `op` would run as planned by itself."""
        if self.prepared.rules[op].drawn or any(self.specs.get(t, 0) is FREE for t in op.inputs):
            return False
        choice = self._decided(op).choice
        if (choice.in_specs, choice.out_specs) != (planned.in_specs, planned.made):
            return False
        made = zip(op.outputs, choice.out_specs, planned.kept, strict=True)
        return all(self._kept(tensor, spec) == kept for tensor, spec, kept in made)
