"""Partition of a step into stages, with as little sent between them as can be."""

from __future__ import annotations

from collections.abc import Mapping

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.passes.copy import copy_graph
from tfpar.ir.roles import Roles
from tfpar.ir.step import StepGraph
from tfpar.ir.traits import ADDITIONS, REARRANGED
from tfpar.pipeline.copies import own_constants, read_once
from tfpar.pipeline.partial_sums import sum_by_stage
from tfpar.pipeline.step_stages import stages_of_step

_HANDED_ON = REARRANGED | ADDITIONS | {"Cast"}
"""They are linear in what they read."""

_ADDED = ADDITIONS | {"Pack"}
"""Ops in which terms of one sum meet: Keras packs the losses of a model before it adds them up."""


def partition_step(
    step: StepGraph, forward_stage: Mapping[Op, int], lying: Mapping[str, int] | None = None
) -> dict[Op, int]:
    """Cut a simplified step into stages, in place; of one stage it stays as it is.

    Args:
        forward_stage, lying: of ops of the forward pass, and of variables; see `stages_of_step`.

    Returns:
        the stage of every op of the step's graph, which is another one now.

    Raises:
        PlanError: as of `stages_of_step`.
    """
    roles = Roles.of(step.graph, step.gradient_tensors)
    stage = stages_of_step(step.graph, roles, forward_stage, lying)
    if len({*stage.values()}) == 1:
        return stage
    found: dict[Op, int] = {}

    def cut(graph: Graph) -> Graph:
        staged, copies = copy_graph(graph)
        stages = {copies[op]: s for op, s in stage.items()}
        for each in (sum_by_stage, read_once, own_constants):
            stages = each(staged, stages)
        found.update(stages)
        return staged

    step.rewrite(cut)
    return found


def sent_whole(graph: Graph, stage: Mapping[Op, int]) -> frozenset[Tensor]:
    """Find the tensors that are summed over ranks and microbatches where they are made: those that
    are sent, and those that are added to them in another stage.

    So the gradient of a weight that several stages read is sent once a step, and added to that of
    its owner after the last microbatch.

    Args:
        stage: of every op.
    """
    readers = graph.consumers()
    sent: set[Tensor] = set()
    found: set[Tensor] = set()
    for op in graph.ops:
        came = [t for t in op.inputs if t in sent or stage[t.op] != stage[op]]
        found.update(came)
        if came and op.type in _ADDED:
            found.update(op.inputs)
        if came and op.type in _HANDED_ON:
            sent.update(t for t in op.outputs if len(readers.get(t, ())) == 1)
    return frozenset(found)
