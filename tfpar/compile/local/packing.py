"""Packing: collectives that need the same group become few (TAP §IV-G).

Independent collectives of one kind, group, dtype and reduction are merged into buckets of
bounded size, in the order in which their inputs become ready. A bucket is one collective with
several operands. Those of different chunks stay apart: one is to be in flight while the other is
computed.

A gather may be ready long before it is needed, as that of a weight is from the beginning of the
step on. Gathered together with what the first layer reads, the last layer's weight would delay the
step and be stored from then on. So gathers share a bucket only if they are needed at the same
time: if nothing that reads one of them has to wait for another. Weights that are gathered in groups
(`ir.passes.gather_weights`) have their turn: those of a group share buckets, and no others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfpar.compile.local.local_graph import NOWHERE, StagePass
from tfpar.compile.local.reshard import CHUNK, DIMS
from tfpar.compile.local.transfers import TRANSFER_TYPES
from tfpar.ir.gathered_weights import find_turn
from tfpar.ir.graph import Graph, Op, Shape, Tensor
from tfpar.ir.order import sort_topologically
from tfpar.ir.traits import HANDED_ON

DEFAULT_BUCKET_BYTES = 32 * 1024 * 1024

_BEFORE_NEED = HANDED_ON | {"Slice"}
"""Op types between a gather and what needs it: uneven dims come padded."""


@dataclasses.dataclass(eq=False)
class _Bucket:
    """Collectives that travel as one.

    Attributes:
        needs: bit set of buckets whose results its members read.
        gathers: bit set of the gathers that it holds, and `before` of those for which something
            waits that reads one of them.
    """

    index: int
    num_bytes: int = 0
    members: list[Op] = dataclasses.field(default_factory=list)
    needs: int = 0
    gathers: int = 0
    before: int = 0


def pack_collectives(
    graph: Graph,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    places: dict[Op, StagePass] | None = None,
    shapes: dict[Tensor, Sequence[Shape]] | None = None,
) -> Graph:
    """Merge independent collectives of `graph`, in place; returns it.

    Two may share a bucket only if none needs the other's result, also through other buckets: that
    would be a cycle. A tensor larger than `bucket_bytes` travels alone.

    Args:
        places: of the ops of a step in stages, kept up to date: those of two stages stay apart.
        shapes: of tensors that differ between ranks, kept up to date.
    """
    places = {} if places is None else places
    shapes = {} if shapes is None else shapes
    filled = _fill(graph, bucket_bytes, places)
    buckets = [bucket for bucket in filled if len(bucket.members) > 1]
    if not buckets:
        return graph
    replacement: dict[Tensor, Tensor] = {}
    moved: dict[Op, Op] = {}
    for bucket in buckets:
        op = _merged(bucket.members)
        if bucket.members[0] in places:
            places[op] = places[bucket.members[0]]
        moved.update(dict.fromkeys(bucket.members, op))
        replacement.update(zip((m.outputs[0] for m in bucket.members), op.outputs, strict=True))
    shapes.update((new, shapes[old]) for old, new in replacement.items() if old in shapes)
    ops = [op for op in graph.ops if op not in moved] + list(dict.fromkeys(moved.values()))
    for op in ops:
        op.inputs = [replacement.get(t, t) for t in op.inputs]
        op.control = list(dict.fromkeys(moved.get(c, c) for c in op.control))
    graph.ops = sort_topologically(ops)
    graph.outputs = [replacement.get(t, t) for t in graph.outputs]
    graph.effects = list(dict.fromkeys(moved.get(e, e) for e in graph.effects))
    return graph


def _merged(members: list[Op]) -> Op:
    """One collective with the operands of all `members`."""
    first = members[0]
    dims = {name: tuple(m.attrs[name][0] for m in members) for name in DIMS[first.type]}
    op = Op(f"{first.name}_packed", first.type, attrs={**first.attrs, **dims})
    for member in members:
        op.inputs.append(member.inputs[0])
        op.add_output(member.outputs[0].shape, member.outputs[0].dtype)
    return op


def payload(op: Op) -> int:
    """Return the bytes that a collective moves, as `propagation.reshard.step_bytes` counts them.

    Of a transfer: those of the tensor, at either end.
    """
    if op.type in TRANSFER_TYPES:
        return sum(t.num_bytes for t in (*op.inputs, *op.outputs))
    return sum(max(i.num_bytes, o.num_bytes) for i, o in zip(op.inputs, op.outputs, strict=True))


def _can_join(op: Op) -> bool:
    if op.type == "AllReduce":
        return not op.control
    # Blocks of others are laid side by side: their sizes have to be known.
    known = all(t.is_static for t in (*op.inputs, *op.outputs))
    return op.type in DIMS and known and not op.control


def _fill(graph: Graph, bucket_bytes: int, places: Mapping[Op, StagePass]) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    current: dict[tuple[object, ...], _Bucket] = {}
    needs: dict[Op, int] = {}
    gathers, before = _times_of_need(graph)
    for op in graph.ops:
        mask = 0
        for tensor in op.inputs:
            mask |= needs[tensor.op]
        for earlier in op.control:
            mask |= needs[earlier]
        if _can_join(op):
            turn = find_turn(op.inputs[0].op) if op.type == "AllGather" else None
            key = (
                op.type,
                op.attrs["axes"],
                op.attrs.get("reduction"),
                op.outputs[0].dtype,
                op.attrs.get(CHUNK),
                places.get(op, NOWHERE).stage,
                turn,
            )
            size, own, others = payload(op), gathers.get(op, 0), before.get(op, 0)
            bucket = current.get(key)
            if (
                bucket is None
                or bucket.num_bytes + size > bucket_bytes
                or (turn is None and (others & bucket.gathers or bucket.before & own))
                or _closure(mask, buckets) >> bucket.index & 1
            ):
                bucket = _Bucket(len(buckets))
                buckets.append(bucket)
                current[key] = bucket
            bucket.members.append(op)
            bucket.num_bytes += size
            bucket.needs |= mask
            bucket.gathers |= own
            bucket.before |= others
            mask |= 1 << bucket.index
        needs[op] = mask
    return buckets


def _times_of_need(graph: Graph) -> tuple[dict[Op, int], dict[Op, int]]:
    """By gather, a bit of its own, and those of the gathers for which its readers wait too."""
    gathers = [op for op in graph.ops if op.type == "AllGather"]
    bits = {op: 1 << i for i, op in enumerate(gathers)}
    if len(bits) < 2:
        return bits, {}
    reached: dict[Op, int] = {}
    readers: dict[Tensor, list[Op]] = {}
    for op in graph.ops:
        mask = bits.get(op, 0)
        for tensor in op.inputs:
            mask |= reached[tensor.op]
            readers.setdefault(tensor, []).append(op)
        reached[op] = mask
    before: dict[Op, int] = {}
    for gather, own in bits.items():
        mask, todo = 0, [*gather.outputs]
        while todo:
            for reader in readers.get(todo.pop(), ()):
                mask |= reached[reader]
                if reader.type in _BEFORE_NEED:
                    todo += reader.outputs
        before[gather] = mask & ~own
    return bits, before


def _closure(mask: int, buckets: list[_Bucket]) -> int:
    """All buckets reachable from those in `mask` through what their members need."""
    seen, todo = 0, mask
    while todo:
        low = todo & -todo
        todo ^= low
        seen |= low
        todo |= buckets[low.bit_length() - 1].needs & ~seen
    return seen
