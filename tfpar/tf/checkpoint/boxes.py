"""Boxes of a logical tensor that each rank stores, and the choice of the ranks that write them.

A shard along one dimension is a row of *runs*: stretches of consecutive entries. A
plain shard is one run, a strided one several, padding none; the product over the dimensions
are the shard's boxes. On a mesh of 2, `S(0/4)` of 8 rows:

    rank 0: rows 0,1 and 4,5     rank 1: rows 2,3 and 6,7
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from tfpar.spec import Mesh, Partial, Shard, Spec, SpecError, format_spec, local_indices


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A contiguous part of a logical tensor that lies contiguously in a shard.

    Attributes:
        begin: first entry in the logical tensor, by dimension.
        size: entries by dimension, here and in the shard.
        local_begin: first entry in the shard.
    """

    begin: tuple[int, ...]
    size: tuple[int, ...]
    local_begin: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a tensor that a rank stores whole."""
        origin = (0,) * len(shape)
        return cls(origin, tuple(shape), origin)

    def slice_spec(self, shape: Sequence[int]) -> str:
        """TensorFlow's `shape_and_slice`: "4 6 0,2:3,3", or "" for the whole tensor."""
        if self.size == tuple(shape):
            return ""
        ranges = ":".join(f"{b},{s}" for b, s in zip(self.begin, self.size, strict=True))
        return f"{' '.join(map(str, shape))} {ranges}"

    def stripes(self, max_entries: int) -> Iterator[Box]:
        """The box in blocks along its first dimension, each of at most `max_entries`.

        A block is never thinner than one entry of that dimension.
        """
        dim = next((d for d, n in enumerate(self.size) if n > 1), None)
        if dim is None or math.prod(self.size) <= max_entries:
            yield self
            return
        length = self.size[dim]
        block = max(1, max_entries * length // math.prod(self.size))
        for at in range(0, length, block):
            yield Box(
                (*self.begin[:dim], self.begin[dim] + at, *self.begin[dim + 1 :]),
                (*self.size[:dim], min(block, length - at), *self.size[dim + 1 :]),
                (*self.local_begin[:dim], self.local_begin[dim] + at, *self.local_begin[dim + 1 :]),
            )


def list_boxes(shape: Sequence[int], spec: Spec, mesh: Mesh, rank: int) -> list[Box]:
    """The boxes that make up the shard of `rank`, padding left out.

    Together the distinct shards cover the tensor once. A tensor without entries
    is one empty box on the first shard.

    Raises:
        SpecError: the value is partial on an axis: no rank holds its entries.
    """
    if any(isinstance(p, Partial) for p in spec):
        raise SpecError(
            f"A tensor with spec {format_spec(spec)} is a partial value on every rank; reduce it "
            f"before it is saved."
        )
    coords = mesh.coordinates(rank)
    if 0 in shape:
        first = not any(c and isinstance(p, Shard) for p, c in zip(spec, coords, strict=True))
        return [Box.whole(shape)] if first else []
    by_dim = [
        find_runs(local_indices(length, dim, spec, mesh, coords))
        for dim, length in enumerate(shape)
    ]
    return [
        Box(
            tuple(begin for begin, _, _ in box),
            tuple(size for _, size, _ in box),
            tuple(at for _, _, at in box),
        )
        for box in itertools.product(*by_dim)
    ]


def find_runs(index: np.ndarray) -> list[tuple[int, int, int]]:
    """(first entry, length, position) of each stretch of consecutive entries; -1 is left out."""
    breaks = np.flatnonzero((np.diff(index) != 1) | (index[:-1] < 0)) + 1
    starts = [0, *breaks.tolist()] if len(index) else []
    ends = [*starts[1:], len(index)]
    return [
        (int(index[start]), end - start, start)
        for start, end in zip(starts, ends, strict=True)
        if index[start] >= 0
    ]


def choose_writers(
    num_bytes: Sequence[int], specs: Sequence[Spec], mesh: Mesh
) -> list[frozenset[int]]:
    """Choose, for each tensor, the ranks that write their shards: one of those with equal shards.

    Ranks that hold the same shards share them out by bytes, the largest tensors first. Every
    rank comes to the same answer from the same tensors in the same order.

    Args:
        num_bytes: of the logical tensors.
    """
    load = np.zeros(mesh.size)
    groups: dict[tuple[int, ...], np.ndarray] = {}
    chosen: list[frozenset[int]] = [frozenset()] * len(specs)
    for i in sorted(range(len(specs)), key=lambda i: -num_bytes[i]):
        sharded = tuple(a for a, p in enumerate(specs[i]) if isinstance(p, Shard))
        if sharded not in groups:
            replicated = tuple(a for a in range(mesh.num_axes) if a not in sharded)
            groups[sharded] = np.array(mesh.groups(replicated))
        holders = groups[sharded]
        writing = holders[np.arange(len(holders)), load[holders].argmin(axis=1)]
        load[writing] += num_bytes[i] / len(holders)
        chosen[i] = frozenset(writing.tolist())
    return chosen


def covers(parts: Sequence[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Whether the (begin, size) boxes, all inside `shape`, hold every entry exactly once."""
    if not shape or 0 in shape:
        return len(parts) == 1
    if sum(math.prod(size) for _, size in parts) != math.prod(shape):
        return False
    begins = np.array([begin for begin, _ in parts])
    ends = begins + np.array([size for _, size in parts])
    # Counted by cells between the edges of all boxes, not by entries.
    edges = [np.unique([begins[:, d], ends[:, d]]) for d in range(len(shape))]
    count = np.zeros([len(edge) - 1 for edge in edges], np.int32)
    first = [np.searchsorted(edge, begins[:, d]).tolist() for d, edge in enumerate(edges)]
    last = [np.searchsorted(edge, ends[:, d]).tolist() for d, edge in enumerate(edges)]
    for low, high in zip(zip(*first, strict=True), zip(*last, strict=True), strict=True):
        count[tuple(map(slice, low, high))] += 1
    return bool((count == 1).all())
