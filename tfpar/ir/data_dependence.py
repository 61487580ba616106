"""Updates of a step that wait for none of its data."""

from __future__ import annotations

from collections.abc import Iterable

from tfpar.ir.graph import Graph, Op, Tensor, Variable
from tfpar.ir.traits import VARIABLE_READS


def find_updates_without(graph: Graph, data: Iterable[Tensor]) -> list[Variable]:
    """Find the variables that some op may write to before any of `data` is there: counters,
    seeds."""
    variables, waiting = graph.variable_of(), {tensor.op for tensor in data}
    found: dict[Variable, None] = {}
    for op in graph.ops:
        if op in waiting or not waiting.isdisjoint(_before(op)):
            waiting.add(op)
        elif op.type not in VARIABLE_READS:
            found |= {variables[t]: None for t in op.inputs if t in variables}
    return [*found]


def _before(op: Op) -> list[Op]:
    return [*(tensor.op for tensor in op.inputs), *op.control]
