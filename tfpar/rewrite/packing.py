"""Packing: all-reduces that need the same group become few (TAP §IV-G).

Independent all-reduces of one group, dtype and reduction are merged into buckets of
bounded size, in the order in which their inputs become ready. A bucket is one
`AllReduce` with several operands. Those of different chunks stay apart: one is to be in flight
while the other is computed.
"""

from __future__ import annotations

import dataclasses

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.order import sort_topologically
from tfpar.rewrite.reshard import CHUNK

DEFAULT_BUCKET_BYTES = 32 * 1024 * 1024


@dataclasses.dataclass(eq=False)
class _Bucket:
    index: int
    key: tuple
    num_bytes: int
    members: list[Op]
    needs: int  # bit set of buckets whose results its members read


def pack_all_reduces(graph: Graph, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Graph:
    """Merge independent all-reduces of `graph`, in place; returns it.

    Two all-reduces may share a bucket only if none needs the other's result, also
    through other buckets: that would be a cycle. A tensor larger than
    `bucket_bytes` travels alone.
    """
    buckets = _fill(graph, bucket_bytes)
    merged = {op: b for b in buckets if len(b.members) > 1 for op in b.members}
    if not merged:
        return graph
    replacement: dict[Tensor, Tensor] = {}
    packed: dict[int, Op] = {}
    for bucket in buckets:
        if len(bucket.members) > 1:
            first = bucket.members[0]
            op = Op(f"{first.name}_packed", "AllReduce", attrs=dict(first.attrs))
            for member in bucket.members:
                op.inputs.append(member.inputs[0])
                out = op.add_output(member.outputs[0].shape, member.outputs[0].dtype)
                replacement[member.outputs[0]] = out
            packed[bucket.index] = op
    ops = [op for op in graph.ops if op not in merged] + list(packed.values())
    moved = {m: packed[b.index] for m, b in merged.items()}
    for op in ops:
        op.inputs = [replacement.get(t, t) for t in op.inputs]
        op.control = list(dict.fromkeys(moved.get(c, c) for c in op.control))
    graph.ops = sort_topologically(ops)
    graph.outputs = [replacement.get(t, t) for t in graph.outputs]
    graph.effects = list(dict.fromkeys(moved.get(e, e) for e in graph.effects))
    return graph


def _fill(graph: Graph, bucket_bytes: int) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    current: dict[tuple, _Bucket] = {}
    needs: dict[Op, int] = {}
    for op in graph.ops:
        mask = 0
        for tensor in op.inputs:
            mask |= needs[tensor.op]
        for before in op.control:
            mask |= needs[before]
        if op.type == "AllReduce" and not op.control:
            key = (
                op.attrs["axes"], op.attrs["reduction"], op.outputs[0].dtype, op.attrs.get(CHUNK)
            )  # fmt: skip
            size = op.outputs[0].num_bytes
            bucket = current.get(key)
            if (
                bucket is None
                or bucket.num_bytes + size > bucket_bytes
                or _closure(mask, buckets) >> bucket.index & 1
            ):
                bucket = _Bucket(len(buckets), key, 0, [], 0)
                buckets.append(bucket)
                current[key] = bucket
            bucket.members.append(op)
            bucket.num_bytes += size
            bucket.needs |= mask
            mask |= 1 << bucket.index
        needs[op] = mask
    return buckets


def _closure(mask: int, buckets: list[_Bucket]) -> int:
    """All buckets reachable from those in `mask` through what their members need."""
    seen, todo = 0, mask
    while todo:
        low = todo & -todo
        todo ^= low
        seen |= low
        todo |= buckets[low.bit_length() - 1].needs & ~seen
    return seen
