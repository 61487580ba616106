"""Undo bundling: each output of an IdentityN is its own input.

Custom gradients and clipping bundle unrelated tensors in one IdentityN. Kept as one op it would
have to split all of them in the same way.
"""

from __future__ import annotations

from tfpar.ir.graph import Graph, Tensor


def split_bundles(graph: Graph) -> Graph:
    """Let readers of an IdentityN read its inputs, in place; returns `graph`.

    One with control inputs is left: its readers wait for something.
    """
    for body in (graph, *graph.functions.values()):
        source: dict[Tensor, Tensor] = {}
        for op in body.ops:
            op.inputs = [source.get(t, t) for t in op.inputs]
            if op.type == "IdentityN" and not op.control:
                source.update(zip(op.outputs, op.inputs, strict=True))
        body.outputs = [source.get(t, t) for t in body.outputs]
    return graph
