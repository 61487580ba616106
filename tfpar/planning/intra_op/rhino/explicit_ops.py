"""Selection of the ops that a plan has to name: those that propagation would decide otherwise.

Rhino's planner decides every op. But given the specs of the weights, propagation comes to most of
these decisions anyhow. Of a layer that the plan splits by columns:

    MatMul   R,S(1) -> S(1)    follows from the kernel's spec
    Relu     S(1) -> S(1)      follows from its input
    Sum      R -> R            propagation would split it: its input is gathered before

only the last needs to be said. So the graph is propagated op by op, and an op is named if what
propagation would do differs from what was decided; what comes after sees it as decided. A plan
of a few names can be read, and fits a step of another batch size better than one of all.
"""

from __future__ import annotations

import dataclasses

from tfpar.ir.graph import Op
from tfpar.propagation.engine import Whole, begin, finish, with_lists_whole
from tfpar.propagation.final_spec import choose_final_spec
from tfpar.propagation.partitioned_graph import Anchors, OpPlan, PartitionedGraph
from tfpar.propagation.planned_op import apply_op_plan
from tfpar.propagation.prepared_graph import PreparedGraph
from tfpar.propagation.rule_decision import decide_by_rule
from tfpar.propagation.state import PropagationState
from tfpar.propagation.step import record, visit
from tfpar.spec import Mesh


def find_explicit_ops(
    prepared: PreparedGraph, mesh: Mesh, anchors: Anchors
) -> tuple[dict[str, OpPlan], PartitionedGraph]:
    """Find those of `anchors.ops` that propagation would decide otherwise; return the graph
    partitioned so, too."""
    free = dataclasses.replace(anchors, ops={})

    def run(whole: Whole) -> tuple[dict[str, OpPlan], PartitionedGraph]:
        state = begin(prepared, mesh, free, whole)
        needed: dict[str, OpPlan] = {}
        for op in prepared.graph.ops:
            planned = anchors.ops.get(op.name)
            if planned is not None and not _runs_so(state, op, planned):
                run = apply_op_plan(state, op, planned)
                if run is not None:
                    record(state, op, *run)
                    needed[op.name] = planned
                    continue
            visit(state, op)
        return needed, finish(state)

    return with_lists_whole(run)


def _runs_so(state: PropagationState, op: Op, planned: OpPlan) -> bool:
    """Whether propagation, asked for `op` alone, would decide as planned."""
    if state.prepared.rules[op].drawn or any(map(state.is_open, op.inputs)):
        return False
    strategy = decide_by_rule(state, op).strategy
    if (strategy.in_specs, strategy.out_specs) != (planned.in_specs, planned.made):
        return False
    made = zip(op.outputs, strategy.out_specs, planned.kept, strict=True)
    return all(choose_final_spec(state, tensor, spec) == kept for tensor, spec, kept in made)
