"""Segment sums whose rows stay within their own block become sums per block.

The gradient of a lookup with batch dims (`take_along_axis`, masked positions) and that of TopK
add an offset per sample to the indices and sum all rows into one long vector. Nothing
of that says that samples keep to themselves, so their split would end in a sum over ranks of
all that the step has for the batch. The offsets are undone here, where the indices
are known to stay inside a sample: the lookup itself, or the TopK, vouches for them.
"""

from __future__ import annotations

import numpy as np

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.constants import Constants
from tfpar.ir.graph import Graph, Op, Tensor, is_floating
from tfpar.ir.traits import ADDITIONS, VIEWS, forwarded_input

BLOCK_SUM = "TfparBlockSum"
"""data (blocks, rows, ...), ids (blocks, rows) -> (blocks, segments, ...)."""


def split_block_sums(graph: Graph, constants: Constants) -> None:
    """Put a `TfparBlockSum` in place of each segment sum of that kind, in place."""
    sums = [op for op in graph.ops if op.type in ("UnsortedSegmentSum", "ScatterNd")]
    if not sums:
        return
    readers = graph.consumers()
    before: dict[Op, list[Op]] = {}
    for op in sums:
        build = GraphBuilder(name=f"{op.name}/blocks")
        if _rewrite(op, build, constants, readers):
            before[op] = build.graph.ops
    if before:
        graph.ops = [new for op in graph.ops for new in (*before.get(op, ()), op)]


def _rewrite(
    op: Op, build: GraphBuilder, constants: Constants, readers: dict[Tensor, list[Op]]
) -> bool:
    """Build the sum per block, of which `op` becomes a Reshape; whether it could be done."""
    data, ids = op.inputs[:2] if op.type == "UnsortedSegmentSum" else op.inputs[1::-1]
    (out,) = op.outputs
    if not (data.is_static and ids.is_static and out.is_static and is_floating(data.dtype)):
        return False
    rows = ids.num_elements
    one_dim = len(ids.shape) == 1 or (op.type == "ScatterNd" and ids.shape[1:] == (1,))
    if not one_dim or data.shape[0] != rows or not rows:
        return False
    found = _without_offsets(ids, constants, readers)
    if found is None:
        return False
    index, offsets, segments = found
    if index.num_elements != rows or out.shape[0] % segments:
        return False
    blocks = out.shape[0] // segments
    if blocks < 2 or rows % blocks:
        return False
    starts = np.arange(blocks)[:, None] * segments
    if not (offsets.reshape(blocks, -1) == starts).all():
        return False
    rest = data.shape[1:]
    inside = build.reshape(index, (blocks, rows // blocks))
    values = build.reshape(data, (blocks, rows // blocks, *rest))
    total = build.one(BLOCK_SUM, (values, inside), (blocks, segments, *rest), data.dtype)
    build.reshape(total, out.shape)
    last = build.graph.ops.pop()
    op.type, op.inputs, op.attrs = last.type, last.inputs, last.attrs
    return True


def _without_offsets(
    ids: Tensor, constants: Constants, readers: dict[Tensor, list[Op]]
) -> tuple[Tensor, np.ndarray, int] | None:
    """Indices of which a bound is known, the constants added to each, and the bound."""
    total = np.zeros((), np.int64)
    while True:
        bound = _bound(ids, constants, readers)
        if bound:
            return ids, np.broadcast_to(total, ids.shape).reshape(-1), bound
        op = ids.op
        if op.type in VIEWS and forwarded_input(ids).is_static:
            # The offsets found so far, in the shape before.
            total = np.broadcast_to(total, ids.shape).reshape(forwarded_input(ids).shape)
            ids = forwarded_input(ids)
            continue
        position, value = _constant_addend(op, constants)
        if value is None or op.inputs[1 - position].shape != ids.shape:
            return None
        total = total + value.astype(np.int64)
        ids = op.inputs[1 - position]


def _constant_addend(op: Op, constants: Constants) -> tuple[int, np.ndarray | None]:
    if op.type in ADDITIONS and len(op.inputs) == 2:
        for position, tensor in enumerate(op.inputs):
            value = constants.value(tensor)
            if value is not None:
                return position, value
    return 0, None


def _bound(index: Tensor, constants: Constants, readers: dict[Tensor, list[Op]]) -> int | None:
    """n where every entry of `index` is known to be in 0..n-1."""
    if index.op.type == "TopKV2" and index.index == 1:
        size: int | None = index.op.inputs[0].shape[-1]
        return size
    for reader in readers.get(index, ()):
        if reader.type != "GatherV2" or reader.inputs[1] is not index:
            continue
        params = reader.inputs[0]
        axis = constants.value(reader.inputs[2])
        if axis is not None and params.is_static:
            size = params.shape[int(axis) % len(params.shape)]
            return size
    return None
