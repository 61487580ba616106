"""All-reduces as reduce-scatters and all-gathers, for dtypes that can be moved and not added up."""

from __future__ import annotations

import math
from collections.abc import Collection

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.order import sort_topologically
from tfpar.spec import Mesh


def decompose_all_reduces(graph: Graph, mesh: Mesh, dtypes: Collection[str]) -> Graph:
    """Replace all-reduces (sums) of `dtypes`, in place; returns the graph.

    The operands of one travel in one buffer, padded to blocks of equal size: each rank adds up a
    block and hands it to the others, which are as many bytes as a ring moves.
    """
    build = GraphBuilder(graph)
    replacement: dict[Tensor, Tensor] = {}
    moved: dict[Op, Op] = {}
    for op in list(graph.ops):
        if _can_be(op, dtypes):
            summed = _summed(build, op, mesh)
            replacement.update(zip(op.outputs, summed, strict=True))
            moved[op] = summed[-1].op
    if not moved:
        return graph
    for op in graph.ops:
        op.inputs = [replacement.get(t, t) for t in op.inputs]
        op.control = [moved.get(c, c) for c in op.control]
    graph.ops = sort_topologically([op for op in graph.ops if op not in moved])
    graph.outputs = [replacement.get(t, t) for t in graph.outputs]
    graph.effects = [moved.get(e, e) for e in graph.effects]
    return graph


def _can_be(op: Op, dtypes: Collection[str]) -> bool:
    return (
        op.type == "AllReduce"
        and op.attrs["reduction"] == "sum"
        and op.outputs[0].dtype in dtypes
        and all(t.is_static for t in op.inputs)
    )


def _summed(build: GraphBuilder, op: Op, mesh: Mesh) -> list[Tensor]:
    """Emit the sums that the all-reduce `op` gives, as a reduce-scatter and an all-gather."""
    build.name, axes = f"{op.name}/blocks", op.attrs["axes"]
    ranks, dtype = mesh.group_size(axes), op.inputs[0].dtype
    sizes = [math.prod(t.shape) for t in op.inputs]
    flat = [build.reshape(t, [n]) for t, n in zip(op.inputs, sizes, strict=True)]
    buffer = build.concat(flat, 0)
    buffer = build.pad(buffer, [-buffer.shape[0] % ranks])
    length = buffer.shape[0]
    attrs = {"axes": axes, "dims": (0,)}
    block = build.one(
        "ReduceScatter", (buffer,), [length // ranks], dtype, {**attrs, "reduction": "sum"}
    )
    whole = build.one("AllGather", (block,), [length], dtype, attrs)
    summed, begin = [], 0
    for tensor, size in zip(op.inputs, sizes, strict=True):
        summed.append(build.reshape(build.slice(whole, [begin], [size]), tensor.shape))
        begin += size
    return summed
