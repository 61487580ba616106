"""Map from the entries of a value to those of a rank's shard.

Along each dimension a shard is a list of `EntryRange`s: runs of neighbouring entries. What is made
or read a few rows at a time is copied piece by piece; nothing here is as long as the dimension.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfpar.spec import Mesh, Shard, Spec, local_shape


@dataclasses.dataclass(frozen=True)
class EntryRange:
    """Entries `start..stop` of a dimension, stored from `at` on.

    Attributes:
        count: how many places they take; more than there are entries where padding repeats one.
    """

    start: int
    stop: int
    at: int
    count: int

    def overlap(self, start: int, stop: int) -> tuple[slice, slice] | None:
        """(entries, places) of what lies within `start..stop`; None for nothing."""
        low, high = max(start, self.start), min(stop, self.stop)
        if low >= high:
            return None
        if self.count != self.stop - self.start:
            return slice(low, high), slice(self.at, self.at + self.count)
        begin = self.at + low - self.start
        return slice(low, high), slice(begin, begin + high - low)


@dataclasses.dataclass(frozen=True)
class RowCopy:
    """Neighbouring entries of one dimension, under one index of the dimensions before it.

    Attributes:
        prefix: the index in the dimensions before.
        rows: the entries.
        target: where in the shard they go, in these dimensions and that one.
    """

    prefix: tuple[int, ...]
    rows: slice
    target: tuple[slice, ...]


class ShardMap:
    """Entries that `rank` stores of a value of `shape`, partitioned by `spec` over `mesh`.

    Padding repeats the last entry, as everywhere in storage.

    Attributes:
        shape: of the whole value; local_shape: of the shard.
        pieces: for each dimension.
    """

    def __init__(self, shape: Sequence[int], spec: Spec, mesh: Mesh, rank: int) -> None:
        self.shape = tuple(shape)
        self.local_shape = local_shape(self.shape, spec, mesh)
        coords = mesh.coordinates(rank)
        self.pieces = [pieces(n, d, spec, mesh, coords) for d, n in enumerate(self.shape)]
        self._stops = [[p.stop for p in found] for found in self.pieces]

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the value itself."""
        return all(
            p == (EntryRange(0, n, 0, n),) for n, p in zip(self.shape, self.pieces, strict=True)
        )

    def copies(self, dim: int, start: int, stop: int) -> list[RowCopy]:
        """List stored parts of rows `start..stop` of the value as `[prod(shape[: dim + 1]), ...]`.

        The row of index `(i, ..., k)` is its row-major number in `shape[: dim + 1]`.
        """
        found: list[RowCopy] = []
        length = self.shape[dim]
        while start < stop:
            number, low = divmod(start, length)
            high = min(length, low + stop - start)
            prefix = tuple(int(i) for i in np.unravel_index(number, self.shape[:dim]))
            found += self._within(prefix, low, high)
            start += high - low
        return found

    def _within(self, prefix: tuple[int, ...], low: int, high: int) -> Iterator[RowCopy]:
        before = [
            [places for _, places in self._overlaps(d, i, i + 1)] for d, i in enumerate(prefix)
        ]
        rows = self._overlaps(len(prefix), low, high)
        for outer in itertools.product(*before):
            for entries, places in rows:
                yield RowCopy(prefix, entries, (*outer, places))

    def _overlaps(self, dim: int, start: int, stop: int) -> list[tuple[slice, slice]]:
        found = []
        for piece in self.pieces[dim][bisect.bisect_right(self._stops[dim], start) :]:
            if piece.start >= stop:
                break
            overlap = piece.overlap(start, stop)
            if overlap is not None:
                found.append(overlap)
        return found

    @functools.cached_property
    def _taken(self) -> list[tuple[slice, np.ndarray | None]]:
        """Per dimension the span of entries that holds all pieces, and which of it are taken."""
        return [_span(found, n) for found, n in zip(self.pieces, self.shape, strict=True)]

    def spans(self, dim: int) -> tuple[slice, ...]:
        """The box that a row of `copies(dim, ...)` is cut from, in the dimensions after `dim`."""
        return tuple(span for span, _ in self._taken[dim + 1 :])

    def row_size(self, dim: int) -> int:
        """Return the number of entries of the box of a row."""
        return math.prod(span.stop - span.start for span in self.spans(dim))

    def take(self, rows: np.ndarray, dim: int) -> np.ndarray:
        """The held entries of `[n, *box]`, the box being that of `spans(dim)`."""
        for axis, (_, index) in enumerate(self._taken[dim + 1 :], start=1):
            if index is not None:
                rows = np.take(rows, index, axis=axis)
        return rows


def pieces(
    length: int, dim: int, spec: Spec, mesh: Mesh, coords: Sequence[int]
) -> tuple[EntryRange, ...]:
    """The pieces of dimension `dim` that are stored at `coords`, by first entry.

    The short form of `tfpar.spec.local_indices`.
    """
    runs, total = [(0, length)], length  # (first entry, how many); padding is entry -1
    for placement, parts, at in zip(spec, mesh.shape, coords, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            runs = _split(runs, total, placement, parts, at)
            total = placement.local_length(total, parts)
    found, at = [], 0
    for start, count in runs:
        if start < 0:
            found.append(EntryRange(length - 1, length, at, count))
        else:
            found.append(EntryRange(start, start + count, at, count))
        at += count
    return tuple(sorted(found, key=lambda piece: piece.start))


def _split(
    runs: list[tuple[int, int]], total: int, shard: Shard, parts: int, at: int
) -> list[tuple[int, int]]:
    """The runs that rank `at` of `parts` keeps of `runs`, `total` entries together."""
    outer, split, unit = shard.view(total)
    block = shard.block(total, parts)
    ends = list(itertools.accumulate(count for _, count in runs))
    kept: list[tuple[int, int]] = []
    for group in range(outer):
        base = group * split * unit
        begin = base + min(at * block, split) * unit
        end = base + min((at + 1) * block, split) * unit
        i = bisect.bisect_right(ends, begin)
        place = begin
        while place < end:
            start, count = runs[i]
            taken = min(ends[i], end) - place
            offset = place - (ends[i] - count)
            _append(kept, start + offset if start >= 0 else -1, taken)
            place += taken
            i += 1
        _append(kept, -1, block * unit - (end - begin))
    return kept


def _append(runs: list[tuple[int, int]], start: int, count: int) -> None:
    """Add a run, joined to the last one where it goes on from it."""
    if not count:
        return
    if runs:
        last, length = runs[-1]
        if (start < 0 and last < 0) or (last >= 0 and start == last + length):
            runs[-1] = (last, length + count)
            return
    runs.append((start, count))


def _span(found: Sequence[EntryRange], length: int) -> tuple[slice, np.ndarray | None]:
    if not found:
        return slice(0, length), None
    start, stop = min(p.start for p in found), max(p.stop for p in found)
    if len(found) == 1 and found[0].count == stop - start:
        return slice(start, stop), None
    index = np.empty(sum(p.count for p in found), np.int64)
    for piece in found:
        index[piece.at : piece.at + piece.count] = np.arange(piece.start, piece.stop) - start
    return slice(start, stop), index


def row_dim(shape: Sequence[int], itemsize: int, limit_bytes: int) -> int:
    """The first dimension below which an entry takes at most `limit_bytes`; the last if none."""
    row: Any = math.prod(shape) * itemsize
    for dim, length in enumerate(shape):
        row //= max(length, 1)
        if row <= limit_bytes:
            return dim
    return len(shape) - 1
