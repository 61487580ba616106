"""Lowering of a captured step to the stages of its plan: every op runs in one of them."""

from __future__ import annotations

from tfpar.compile.local.local_graph import StagePass
from tfpar.compile.local.scatter_gather import Slicing
from tfpar.compile.local.stage_split import PipelineLowering
from tfpar.ir.graph import Graph
from tfpar.ir.roles import BACKWARD, Roles
from tfpar.ir.step import StepGraph
from tfpar.pipeline.stage_partition import sent_whole
from tfpar.plans.stages import PipelinePlan
from tfpar.propagation.prepared_graph import PreparedGraph, prepare


def lower_to_stages(
    step: StepGraph, planned: PipelinePlan, part: bool = False, slicing: Slicing | None = None
) -> PipelineLowering:
    """Cut a simplified step into the stages of a plan, in place.

    Args:
        part: the step is part of the planned one, such as an evaluation.
        slicing: what is sent in slices; None: nothing.

    Raises:
        PlanError: the plan gives an op no stage, or a variable two.
    """
    stage = planned.cut(step, part)
    roles = Roles.of(step.graph, step.gradient_tensors)
    places = {op: StagePass(stage[op], roles.phase[op] == BACKWARD) for op in step.graph.ops}
    return PipelineLowering(places, planned.schedule, planned.recompute, slicing, planned.ranks)


def prepare_staged(graph: Graph, staged: PipelineLowering | None) -> PreparedGraph:
    """Look up the rules of a step's ops; what is sent from stage to stage is reduced before."""
    if staged is None:
        return prepare(graph)
    stage = {op: place.stage for op, place in staged.places.items()}
    return prepare(graph, whole=sent_whole(graph, stage))
