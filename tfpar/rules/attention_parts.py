"""Parts and chunks of the positions of an attention, and what moves between the parts; see
`rules.attention_blocks`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfpar.ir.attention import Expression, is_causal, is_hidden
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import Tensor
from tfpar.rules.attention_chunks import PERMUTATION, Chunk

LONGEST = 4096
"""The positions of a chunk from which it is cut in two (empirical: a block of float32 is 64 MB)."""

MOST_CHUNKS = 16
"""The number of chunks of all positions above which none is cut in two: blocks are written out."""


class Place(NamedTuple):
    """Rows and columns that a block is of.

    Attributes:
        keep: by part, whether it is; None: it is for all.
    """

    row: int
    column: int
    keep: np.ndarray | None


class Pair(NamedTuple):
    """Rows and columns of a block, which may differ from part to part."""

    rows: Chunk
    columns: Chunk
    places: list[Place]


class Parts:
    """Writer of rows and columns in parts.

    Args:
        scores: the tree of the scores, of which masks are told.
        lengths: how many rows there are, and how many columns.

    Attributes:
        zigzag: each part has positions from the front and from the back.
        chunks: in each part.
    """

    def __init__(
        self, build: GraphBuilder, scores: Expression, lengths: tuple[int, int], parts: int
    ) -> None:
        self.build, self.parts = build, parts
        self._scores, self._lengths = scores, lengths
        length, columns = lengths
        self._causal = length == columns and is_causal(scores, length)
        even = length % (2 * parts) == 0
        self.zigzag = self._causal and even and parts > 1
        self.chunks = 2 if self._causal and even else 1
        while length == columns and _can_halve(length, parts, self.chunks):
            self.chunks *= 2

    def rows(self, tensors: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Chunk]:
        """Rows, in chunks."""
        found = {i: t for i, t in enumerate(operands) if t.shape[-1] == 1 or t.shape[-2] > 1}
        return self._chunks(tensors, found, self._lengths[0])

    def columns(self, tensors: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Chunk]:
        """Columns, in chunks, as they are in the first turn."""
        found = {
            i: self.build.reshape(t, (*t.shape[:-2], t.shape[-1], 1))
            for i, t in enumerate(operands)
            if t.shape[-2] == 1 < t.shape[-1]
        }
        return self._chunks(tensors, found, self._lengths[1])

    def _chunks(
        self, tensors: Sequence[Tensor], operands: Mapping[int, Tensor], length: int
    ) -> list[Chunk]:
        cut = [self._cut(t) for t in tensors]
        of_operands = {
            i: self._cut(t) if t.shape[-2] > 1 else [self._unparted(t)] * self.chunks
            for i, t in operands.items()
        }
        each = length // (self.parts * self.chunks)
        return [
            Chunk(
                tuple(pieces[i] for pieces in cut),
                {index: pieces[i] for index, pieces in of_operands.items()},
                self._starts(i, each),
                each,
            )
            for i in range(self.chunks)
        ]

    def _starts(self, chunk: int, each: int) -> np.ndarray:
        part = np.arange(self.parts)
        if not self.zigzag:
            return (part * self.chunks + chunk) * each
        half = self.chunks // 2
        place = part if chunk < half else 2 * self.parts - 1 - part
        return (place * half + chunk % half) * each

    def _unparted(self, x: Tensor) -> Tensor:
        return self.build.reshape(x, (*x.shape[:-2], 1, *x.shape[-2:]))

    def _cut(self, x: Tensor) -> list[Tensor]:
        """(*batch, positions, features) as chunks (*batch, parts, chunk, features)."""
        build, (*batch, length, features) = self.build, x.shape
        if self.chunks == 1:
            return [build.reshape(x, (*batch, self.parts, length // self.parts, features))]
        if not self.zigzag:
            return self._pieces(x, self.parts, self.chunks)
        halves = self._pieces(x, self.parts, 2)
        even, odd = (
            self._permuted(half, [_zigzag(2 * p + i, self.parts) for p in range(self.parts)])
            for i, half in enumerate(halves)
        )
        # The first chunk of rank r is that of number r: the even half of some rank if r is even.
        flags = self.flags(np.arange(self.parts) % 2 == 0)
        low, high = build.select(flags, even, odd), build.select(flags, odd, even)
        return [piece for half in (low, high) for piece in self._halved(half)]

    def _halved(self, x: Tensor) -> list[Tensor]:
        """(*batch, parts, positions, features) as the chunks of one of its two halves."""
        count, dim = self.chunks // 2, len(x.shape) - 2
        each = x.shape[dim] // count
        return [self._slice(x, dim, i * each, each) for i in range(count)]

    def _pieces(self, x: Tensor, parts: int, count: int) -> list[Tensor]:
        build, (*batch, length, features) = self.build, x.shape
        each = length // parts // count
        view = build.reshape(x, (*batch, parts, count, each, features))
        shape = (*batch, parts, each, features)
        return [build.reshape(self._slice(view, len(batch) + 1, i, 1), shape) for i in range(count)]

    def _slice(self, x: Tensor, dim: int, begin: int, size: int) -> Tensor:
        begins, sizes = [0] * len(x.shape), list(x.shape)
        begins[dim], sizes[dim] = begin, size
        return self.build.slice(x, begins, sizes)

    def joined(self, chunks: Sequence[Tensor], like: Tensor) -> Tensor:
        """Undo the cutting, for a tensor of the shape of `like`."""
        build = self.build
        if self.zigzag:
            half = self.chunks // 2
            at = len(chunks[0].shape) - 2
            low, high = (build.concat(chunks[i : i + half], at) for i in (0, half))
            flags = self.flags(np.arange(self.parts) % 2 == 0)
            halves = build.select(flags, low, high), build.select(flags, high, low)
            chunks = []
            for i, each in enumerate(halves):
                targets = [_zigzag(2 * p + i, self.parts) for p in range(self.parts)]
                chunks.append(self._permuted(each, [targets.index(p) for p in range(self.parts)]))
        if len(chunks) > 1:
            stacked = [build.expand_dims(c, len(c.shape) - 2) for c in chunks]
            return build.reshape(build.concat(stacked, len(stacked[0].shape) - 3), like.shape)
        return build.reshape(chunks[0], like.shape)

    def flags(self, values: np.ndarray) -> Tensor:
        """A boolean for each part."""
        return self.build.const(values.reshape(-1, 1, 1))

    # --- what moves -------------------------------------------------------------------------

    def shift(self, x: Tensor) -> Tensor:
        """Have each part get what the next one has."""
        return self._permuted(x, [(p - 1) % self.parts for p in range(self.parts)], ahead=True)

    def moved_on(self, chunk: Chunk) -> Chunk:
        """Columns of the next turn."""
        return dataclasses.replace(
            chunk,
            tensors=tuple(map(self.shift, chunk.tensors)),
            operands={
                i: self.shift(t) if t.shape[-2] > 1 else t for i, t in chunk.operands.items()
            },
            starts=np.roll(chunk.starts, -1),
        )

    def _permuted(self, x: Tensor, targets: Sequence[int], ahead: bool = False) -> Tensor:
        """Have part p go to `targets[p]`.

        Args:
            ahead: nothing waits for it but the next turn.
        """
        if [*targets] == [*range(self.parts)]:
            return x
        attrs = {"targets": tuple(targets), "ahead": ahead}
        return self.build.one(PERMUTATION, (x,), x.shape, x.dtype, attrs)

    # --- which blocks there are ---------------------------------------------------------------

    def pairs(self, rows: Sequence[Chunk], columns: Sequence[Chunk]) -> list[Pair]:
        """The blocks of a turn. Those that no part needs are left out; of two that no part needs
        both, parts select one."""
        found: list[Pair] = []
        waiting: list[tuple[int, int, np.ndarray]] = []
        for i, j in itertools.product(range(len(rows)), range(len(columns))):
            seen = self._seen_by(rows[i], columns[j])
            if seen.all():
                found.append(Pair(rows[i], columns[j], [Place(i, j, None)]))
            elif seen.any():
                waiting.append((i, j, seen))
        while waiting:
            i, j, seen = waiting.pop(0)
            places, pair = [Place(i, j, seen)], Pair(rows[i], columns[j], [])
            for other in [*waiting]:
                if not (other[2] & seen).any():
                    waiting.remove(other)
                    pair = Pair(
                        self._either(seen, pair.rows, rows[other[0]]),
                        self._either(seen, pair.columns, columns[other[1]]),
                        [],
                    )
                    seen = seen | other[2]
                    places.append(Place(*other))
            found.append(pair._replace(places=places))
        return found

    def _seen_by(self, rows: Chunk, columns: Chunk) -> np.ndarray:
        """By part, whether some row sees some column."""
        if not self._causal:
            return np.ones(self.parts, bool)
        hidden = is_hidden(self._scores, rows.ends(), columns.ends())
        return ~np.broadcast_to(np.asarray(hidden, bool), (self.parts,))

    def _either(self, first: np.ndarray, one: Chunk, other: Chunk) -> Chunk:
        """By part, one chunk or the other."""
        if one is other:
            return one
        flags = self.flags(first)
        select = self.build.select
        return Chunk(
            tuple(select(flags, a, b) for a, b in zip(one.tensors, other.tensors, strict=True)),
            {
                i: t if t is other.operands[i] else select(flags, t, other.operands[i])
                for i, t in one.operands.items()
            },
            np.where(first, one.starts, other.starts),
            one.length,
        )


def _can_halve(length: int, parts: int, chunks: int) -> bool:
    """Whether chunks are long enough to be cut in two, and not too many."""
    each = length // (parts * chunks)
    even = length % (2 * parts * chunks) == 0
    return even and each > LONGEST and 2 * parts * chunks <= MOST_CHUNKS


def _zigzag(chunk: int, parts: int) -> int:
    """The part that has a chunk of `2 * parts`."""
    return min(chunk, 2 * parts - 1 - chunk)
