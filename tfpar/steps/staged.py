"""Where each op of a captured step runs, once a plan has stages."""

from __future__ import annotations

from tfpar.ir.graph import Graph
from tfpar.ir.roles import BACKWARD, Roles
from tfpar.ir.step import StepGraph
from tfpar.pipeline.staged import sent_whole
from tfpar.plans.stages import PlannedStages
from tfpar.propagation.prepared import PreparedGraph, prepare
from tfpar.rewrite.local_graph import Place
from tfpar.rewrite.slices import Slicing
from tfpar.rewrite.stages import StagedStep


def staged_step(
    step: StepGraph, planned: PlannedStages, part: bool = False, slicing: Slicing | None = None
) -> StagedStep:
    """Cut a simplified step into the stages of a plan, in place.

    Args:
        part: the step is part of the planned one, such as an evaluation.
        slicing: what is sent in slices; None: nothing.

    Raises:
        PlanError: the plan gives an op no stage, or a variable two.
    """
    stage = planned.cut(step, part)
    roles = Roles.of(step.graph, step.gradient_tensors)
    places = {op: Place(stage[op], roles.phase[op] == BACKWARD) for op in step.graph.ops}
    return StagedStep(places, planned.schedule, planned.recompute, slicing, planned.ranks)


def prepare_staged(graph: Graph, staged: StagedStep | None) -> PreparedGraph:
    """Look up the rules of a step's ops; what is sent from stage to stage is reduced before."""
    if staged is None:
        return prepare(graph)
    stage = {op: place.stage for op, place in staged.places.items()}
    return prepare(graph, whole=sent_whole(graph, stage))
