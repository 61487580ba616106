"""Copying graphs, for passes that change one that others still read."""

from __future__ import annotations

import dataclasses

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.passes.trim import clone_op


def copy_graph(graph: Graph) -> tuple[Graph, dict[Op, Op]]:
    """Copy a graph: the same ops on the same functions; return the copy of each op, too.

    Ops that are not in the graph, as where it is cut from another, are not waited for.
    """
    copies: dict[Op, Op] = {}

    def copied(tensor: Tensor) -> Tensor:
        return copies[tensor.op].outputs[tensor.index]

    for op in graph.ops:
        copies[op] = clone_op(op, [copied(t) for t in op.inputs])
        copies[op].control = [copies[c] for c in op.control if c in copies]
    found = Graph(
        [*copies.values()],
        [copied(t) for t in graph.inputs],
        [copied(t) for t in graph.outputs],
        [dataclasses.replace(v, handle=copied(v.handle)) for v in graph.variables],
        graph.functions,
        [copies[op] for op in graph.effects],
    )
    return found, copies
