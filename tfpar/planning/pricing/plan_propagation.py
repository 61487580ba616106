"""Propagation of a plan through the whole graph of its problem."""

from __future__ import annotations

from collections.abc import Collection

from tfpar.ir.collection import collection_paused
from tfpar.ir.graph import Tensor
from tfpar.ir.roles import Roles
from tfpar.planning.memory.plan_transforms import apply_plan_transforms
from tfpar.planning.problem import Problem, step_anchors
from tfpar.plans import Plan
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.propagation.prepared_graph import prepare


def propagate_plan(plan: Plan, problem: Problem) -> PartitionedGraph:
    """Partition the whole graph of a problem by `plan`, with what it computes again."""
    return propagate_transformed(plan, apply_plan_transforms(problem, plan))


def propagate_transformed(
    plan: Plan, problem: Problem, whole: Collection[Tensor] = ()
) -> PartitionedGraph:
    """Partition the whole graph of a problem by `plan`, where the graph is as the plan runs it
    already.

    Args:
        whole: see `prepared_graph.prepare`.
    """
    with collection_paused():
        prepared = prepare(problem.step.graph, whole=whole)
        laid = propagate(prepared, plan.mesh, step_anchors(plan, problem))
        laid.wire_dtypes = Roles.of(
            problem.step.graph, compression=problem.step.compression
        ).wire_dtypes
        laid.jit_compile = problem.step.jit_compile
        return laid


def priced_roles(laid: PartitionedGraph, problem: Problem) -> Roles:
    """Return the roles of the ops of a problem's whole graph, of which stand-ins cost nothing."""
    stand_ins = dict.fromkeys(problem.step.zero_cost_ops, 0)
    return Roles.of(
        laid.graph,
        times=stand_ins,
        compression=problem.step.compression,
        jit_compile=problem.step.jit_compile,
    )
