"""Optimizer slots with other specs than their weights, in a graph that has no optimizer.

    %gradient -> AssignSub(%weight)     becomes     %gradient -> Identity -> AssignSub(%weight)

The Identity stands for the optimizer's work and has the spec of the slots: if these are split, it
reads the gradient split (a reduce-scatter), and the weight is given the whole of it (a gather).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tfpar.ir.graph import DType, Graph, Op, Tensor
from tfpar.ir.passes.copy import copy_graph

_MARK = "slots_of"


def name_of_slots(weight: str) -> str:
    """Return the name of the tensor that a weight's optimizer computes."""
    return f"slots/{weight}:0"


def separate_slots(
    graph: Graph, stand_ins: Collection[Op], weights: Collection[str]
) -> tuple[Graph, dict[Op, Op]]:
    """Return a copy of a planning graph in which the slots of some weights can have other specs
    than these, and the copy of each op.

    Args:
        stand_ins: the updates (`PlanningGraph.stand_ins`).
        weights: names of variables.
    """
    found, copies = copy_graph(graph)
    names = {v.handle: v.name for v in found.variables}
    before: dict[Op, Op] = {}
    for op in stand_ins:
        update = copies[op]
        weight, gradient = names[update.inputs[0]], update.inputs[1]
        if weight in weights:
            slots = Op(name_of_slots(weight).removesuffix(":0"), "Identity", [gradient])
            slots.attrs = {"T": DType(gradient.dtype), _MARK: weight}
            update.inputs[1] = slots.add_output(gradient.shape, gradient.dtype)
            before[update] = slots
    ops = [new for op in found.ops for new in (*filter(None, [before.get(op)]), op)]
    apart = Graph(ops, found.inputs, found.outputs, found.variables, found.functions, found.effects)
    return apart, copies


def find_separate_slots(graph: Graph) -> Mapping[str, Tensor]:
    """Find the tensor that stands for the optimizer's work on each weight whose slots are sharded
    separately, by the weight's name."""
    return {str(op.attrs[_MARK]): op.outputs[0] for op in graph.ops if _MARK in op.attrs}
