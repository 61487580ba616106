"""Transfers between meshes: each rank gets the pieces of a tensor that it stores in its own spec.

    rank 0 has h, whole        h[0:4] -> rank 1,  h[4:8] -> rank 2
    ranks 3 and 4 have half    h[0:4] of 3 and h[4:8] of 4 -> rank 5, which joins them

What is sent are the intersections of boxes (`spec.pieces`), and nothing twice to a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfpar.compile.local.programs import Group
from tfpar.compile.local.transfers import recv, send
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import DType, Op, Shape, Tensor
from tfpar.spec.pieces import Pieces, Positions, ShardedTensor, pieces_between


class End(NamedTuple):
    """One end of a transfer: where its ops are added.

    Attributes:
        group: its ranks of the job.
        layout: of the tensor there.
        shapes: of tensors whose shapes differ between ranks, to which it is added.
    """

    build: GraphBuilder
    group: Group
    layout: ShardedTensor
    shapes: dict[Tensor, Sequence[Shape]]


def transfer(
    tensor: Tensor, source: End, target: End, key: str, control: Sequence[Op] = ()
) -> Tensor:
    """Send `tensor` of the ranks of one mesh to those of another, and return what these receive.

    Args:
        key: of the transfer; that of each piece begins so.
        control: what the first piece is received after.

    Raises:
        SpecError: the source does not store what the target needs.
    """
    found = pieces_between(source.layout, target.layout)
    received = []
    for i, piece in enumerate(found.pieces):
        name = key if len(found.pieces) == 1 else f"{key}/piece{i}"
        for sent in piece.targets():
            taken = [
                piece.taken[sent[rank]] if rank in sent else None
                for rank in range(len(source.group))
            ]
            part = _take(source, tensor, taken)
            targets = [
                target.group[sent[rank]] if rank in sent else None
                for rank in range(len(source.group))
            ]
            send(source.build, part, name, targets)
        sources = [None if s is None else source.group[s] for s in piece.sources]
        shape = piece.sizes[target.build.rank]
        got = recv(target.build, shape, tensor.dtype, name, sources, control)
        _note(target, got, piece.sizes)
        received.append(got)
    return _joined(target, received, found)


def _note(end: End, tensor: Tensor, sizes: Sequence[Sequence[int]]) -> None:
    shapes = [tuple(size) for size in sizes]
    if any(shape != shapes[0] for shape in shapes):
        end.shapes[tensor] = shapes


def _take(end: End, tensor: Tensor, taken: Sequence[Positions | None]) -> Tensor:
    """The entries of `tensor` at positions that differ by rank; any where they are None."""
    shapes = _shapes(end, tensor)
    given = next(positions for positions in taken if positions is not None)
    filled = [
        [np.arange(min(len(p), n)) for p, n in zip(given, shape, strict=True)]
        if each is None
        else each
        for each, shape in zip(taken, shapes, strict=True)
    ]
    for dim in range(len(given)):
        positions = [each[dim] for each in filled]
        lengths = [shape[dim] for shape in shapes]
        if not _is_whole(positions, lengths):
            tensor = _gather(end, tensor, dim, positions)
    return tensor


def _joined(end: End, received: Sequence[Tensor], found: Pieces) -> Tensor:
    """The pieces of a grid as one tensor, in the order in which each rank stores its entries."""
    parts = [*received]
    for dim in reversed(range(len(found.grid))):
        count = found.grid[dim]
        parts = [_concat(end, parts[i : i + count], dim) for i in range(0, len(parts), count)]
    (whole,) = parts
    for dim in range(len(found.grid)):
        order = [each[dim] for each in found.order]
        if not _is_whole(order, [shape[dim] for shape in _shapes(end, whole)]):
            whole = _gather(end, whole, dim, order)
    return whole


def _is_whole(positions: Sequence[np.ndarray], lengths: Sequence[int]) -> bool:
    """Whether each rank takes all of its entries, in their order."""
    return all(np.array_equal(p, np.arange(n)) for p, n in zip(positions, lengths, strict=True))


def _shapes(end: End, tensor: Tensor) -> Sequence[Shape]:
    """The shape of `tensor` on each rank."""
    return end.shapes.get(tensor, [tensor.shape] * len(end.group))


def _concat(end: End, parts: Sequence[Tensor], dim: int) -> Tensor:
    whole = end.build.concat(parts, dim)
    if len(parts) > 1:
        each = zip(*(_shapes(end, part) for part in parts), strict=True)
        _note(end, whole, [_behind(shapes, dim) for shapes in each])
    return whole


def _behind(shapes: Sequence[Shape], dim: int) -> tuple[int, ...]:
    first, *_ = shapes
    return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])


def _gather(end: End, x: Tensor, dim: int, indices: Sequence[np.ndarray]) -> Tensor:
    """Gather entries along `dim` that differ by rank."""
    build = end.build
    at = build.per_rank([index.astype(np.int32) for index in indices])
    _note(end, at, [(len(index),) for index in indices])
    sizes = [
        (*shape[:dim], len(index), *shape[dim + 1 :])
        for shape, index in zip(_shapes(end, x), indices, strict=True)
    ]
    attrs = {
        "Tparams": DType(x.dtype),
        "Tindices": DType("int32"),
        "Taxis": DType("int32"),
        "batch_dims": 0,
    }
    inputs = (x, at, build.const(np.int32(dim)))
    found = build.one("GatherV2", inputs, sizes[build.rank], x.dtype, attrs)
    _note(end, found, sizes)
    return found
