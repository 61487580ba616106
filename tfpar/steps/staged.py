"""Where each op of a captured step runs, once a plan has stages."""

from __future__ import annotations

from collections.abc import Mapping

from tfpar.ir.graph import Graph, Op
from tfpar.ir.roles import BACKWARD, Roles
from tfpar.ir.step import StepGraph
from tfpar.pipeline.staged import sent_whole, stage_step
from tfpar.pipeline.step_stages import assignable
from tfpar.plans.stages import PlannedStages
from tfpar.propagation.prepared import PreparedGraph, prepare
from tfpar.rewrite.local_graph import Place
from tfpar.rewrite.stages import StagedStep


def staged_step(step: StepGraph, planned: PlannedStages, part: bool = False) -> StagedStep:
    """Cut a simplified step into the stages of a plan, in place.

    Args:
        part: the step is part of the planned one, such as an evaluation: its ops have other
            names, and go with what they read.

    Raises:
        PlanError: the plan gives an op no stage, or a variable two.
    """
    graph = step.graph
    roles = Roles.of(graph, step.gradient_tensors)
    ops = assignable(graph, roles)
    forward = with_what_they_read(graph, planned.owners) if part else planned.forward_stages(ops)
    stage = stage_step(step, {op: forward[op] for op in ops if op in forward})
    roles = Roles.of(step.graph, step.gradient_tensors)
    places = {op: Place(stage[op], roles.phase[op] == BACKWARD) for op in step.graph.ops}
    return StagedStep(places, planned.schedule, planned.recompute)


def prepare_staged(graph: Graph, staged: StagedStep | None) -> PreparedGraph:
    """Look up the rules of a step's ops; what is sent from stage to stage is reduced before."""
    if staged is None:
        return prepare(graph)
    stage = {op: place.stage for op, place in staged.places.items()}
    return prepare(graph, whole=sent_whole(graph, stage))


def with_what_they_read(graph: Graph, owners: Mapping[str, int]) -> dict[Op, int]:
    """The latest stage of what each op comes of: of variables, by name, and of other ops."""
    stage = {v.handle.op: owners.get(v.name, 0) for v in graph.variables}
    for op in graph.ops:
        stage.setdefault(op, max((stage[t.op] for t in op.inputs), default=0))
    return stage
