"""Attention on blocks of its scores: the decomposition of `rules.attention`.

Positions are cut into parts, one for each rank that they are split over, and these into chunks.
Operands become tensors (*batch, parts, chunk, features), so that a rank has one part of each. In
each of `parts` turns a rank sees its own rows and the columns of another rank, and from turn to
turn columns move on by one rank:

    turn 0      rank 0: columns 0     rank 1: columns 1     rank 2: columns 2
    turn 1      rank 0: columns 1     rank 1: columns 2     rank 2: columns 0

What a row has seen so far is three numbers or vectors: the largest score, the sum of
exp(score - largest), and the sum of values so weighted (online softmax: Milakov and Gimelshein,
2018, §3). The gradient computes scores again, and adds up those of keys and values on columns, with
which they travel until they are at home.

Where a mask hides all entries of a block, the block is left out. With a causal mask, rank 0 would
have little to do and the last one much. So each has a chunk from the front and one from the back
(zigzag: Zhu, 2024), and in each turn every rank sees half of what there is:

    rank 0: rows 0, 5     rank 1: rows 1, 4     rank 2: rows 2, 3

Which half depends on the rank: the first of the columns' two chunks to both of rows, or the second
of rows to both of columns. So those blocks are computed as one, whose operands each rank selects.

A block is computed when that before it is done: no two are in memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfpar.ir.attention import (
    GRADIENT,
    SCORES,
    WEIGHTS,
    Expression,
    Trees,
    is_causal,
    is_hidden,
    simplified,
)
from tfpar.ir.builder import GraphBuilder, numpy_dtype
from tfpar.ir.graph import DType, Graph, Op, Tensor
from tfpar.rules.attention_chunks import PERMUTATION, Chunk, Entries, ScoreBlock
from tfpar.rules.pseudo import begin_decomposition

LONGEST = 4096
"""The positions of a chunk from which it is cut in two (empirical: a block of float32 is 64 MB)."""

MOST_CHUNKS = 16
"""The number of chunks of all positions above which none is cut in two: blocks are written out."""


def expand_attention(op: Op, parts: int) -> Graph:
    """Build the graph that `ATTENTION` stands for, with positions in so many parts."""
    build, inputs = begin_decomposition(op, "attention")
    q, k, v, *operands = inputs
    ring = _Ring(build, Trees.of(op), q, k, parts)
    rows = ring.rows([q], operands)
    columns = ring.columns([k, v], operands)
    dtype = op.outputs[1].dtype
    seen: list[_Seen | None] = [None] * len(rows)
    for turn in range(parts):
        for pair in ring.pairs(rows, columns, turn):
            block = ring.block(pair)
            scores = ring.scores(block)
            made = ring.seen(block, scores, dtype)
            for place in pair.places:
                seen[place.row] = ring.merged(seen[place.row], made, place.keep)
            ring.done(*seen)
        if turn + 1 < parts:
            columns = [ring.moved_on(chunk) for chunk in columns]
    found = [s for s in seen if s is not None]
    results = [
        build.cast(build.binary("RealDiv", s.values, s.total), op.outputs[0].dtype) for s in found
    ]
    build.graph.outputs = [
        ring.joined(results, op.outputs[0]),
        ring.joined([s.largest for s in found], op.outputs[1]),
        ring.joined([s.total for s in found], op.outputs[2]),
    ]
    return build.graph


def expand_gradient(op: Op, parts: int) -> Graph:
    """Build the graph that `ATTENTION_GRADIENT` stands for, with positions in so many parts."""
    build, inputs = begin_decomposition(op, "attention")
    q, k, v, result, largest, total, gradient, *operands = inputs
    dtype = largest.dtype
    ring = _Ring(build, Trees.of(op), q, k, parts)
    product = build.binary("Mul", build.cast(gradient, dtype), build.cast(result, dtype))
    mean = build.reduce("Sum", product, [-1], keep_dims=True)
    ring.done(mean)
    rows = ring.rows([q, largest, total, gradient, mean], operands)
    columns = ring.columns([k, v], operands)
    of_q: list[Tensor | None] = [None] * len(rows)
    of_columns: list[tuple[Tensor, Tensor] | None] = [None] * len(columns)
    for turn in range(parts):
        for pair in ring.pairs(rows, columns, turn):
            each = ring.gradients(ring.block(pair), dtype)
            for place in pair.places:
                of_q[place.row] = ring.added(of_q[place.row], each.q, place.keep)
                before = of_columns[place.column] or (None, None)
                own = [
                    ring.added(b, t, place.keep)
                    for b, t in zip(before, (each.k, each.v), strict=True)
                ]
                of_columns[place.column] = own[0], own[1]
            ring.done(*of_q, *itertools.chain(*filter(None, of_columns)))
        if parts > 1:
            if turn + 1 < parts:
                columns = [ring.moved_on(chunk) for chunk in columns]
            of_columns = [
                None if pair is None else (ring.shift(pair[0]), ring.shift(pair[1]))
                for pair in of_columns
            ]
    made: list[list[Tensor]] = [
        [t for t in of_q if t is not None],
        *([pair[i] for pair in of_columns if pair is not None] for i in (0, 1)),
    ]
    build.graph.outputs = [
        ring.joined([build.cast(t, output.dtype) for t in chunks], output)
        for chunks, output in zip(made, op.outputs, strict=True)
    ]
    return build.graph


class _Place(NamedTuple):
    """Rows and columns that a block is of.

    Attributes:
        keep: by part, whether it is; None: it is for all.
    """

    row: int
    column: int
    keep: np.ndarray | None


class _Pair(NamedTuple):
    """Rows and columns of a block, which may differ from part to part."""

    rows: Chunk
    columns: Chunk
    places: list[_Place]


class _Seen(NamedTuple):
    """State of rows, of all that they have seen: the largest score, the sum of
    exp(score - largest), and the sum of values so weighted."""

    largest: Tensor
    total: Tensor
    values: Tensor


class _Gradients(NamedTuple):
    """Gradients of the operands of a block."""

    q: Tensor
    k: Tensor
    v: Tensor


class _Ring:
    """Writer of an attention whose positions are in parts."""

    def __init__(self, build: GraphBuilder, trees: Trees, q: Tensor, k: Tensor, parts: int) -> None:
        self.build, self.trees, self.parts = build, trees, parts
        self._lengths = q.shape[-2], k.shape[-2]
        shared = self._lengths[0] == self._lengths[1]
        self._causal = self.zigzag = False
        chunks = 1
        if shared:
            length = self._lengths[0]
            self._causal = is_causal(trees.scores, length)
            self.zigzag = self._causal and parts > 1 and length % (2 * parts) == 0
            chunks = 2 if self._causal and length % (2 * parts) == 0 else 1
            while _can_halve(length, parts, chunks):
                chunks *= 2
        self.chunks = chunks
        self._awaited: list[Op] = []

    # --- parts and chunks -------------------------------------------------------------------

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
        flags = self._flags(np.arange(self.parts) % 2 == 0)
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
            flags = self._flags(np.arange(self.parts) % 2 == 0)
            halves = build.select(flags, low, high), build.select(flags, high, low)
            chunks = []
            for i, each in enumerate(halves):
                targets = [_zigzag(2 * p + i, self.parts) for p in range(self.parts)]
                chunks.append(self._permuted(each, [targets.index(p) for p in range(self.parts)]))
        if len(chunks) > 1:
            stacked = [build.expand_dims(c, len(c.shape) - 2) for c in chunks]
            return build.reshape(build.concat(stacked, len(stacked[0].shape) - 3), like.shape)
        return build.reshape(chunks[0], like.shape)

    def _flags(self, values: np.ndarray) -> Tensor:
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

    # --- blocks -----------------------------------------------------------------------------

    def pairs(self, rows: Sequence[Chunk], columns: Sequence[Chunk], turn: int) -> list[_Pair]:
        """The blocks of a turn. Those that no part needs are left out; of two that no part needs
        both, parts select one."""
        found: list[_Pair] = []
        waiting: list[tuple[int, int, np.ndarray]] = []
        for i, j in itertools.product(range(len(rows)), range(len(columns))):
            seen = self._seen_by(rows[i], columns[j])
            if seen.all():
                found.append(_Pair(rows[i], columns[j], [_Place(i, j, None)]))
            elif seen.any():
                waiting.append((i, j, seen))
        while waiting:
            i, j, seen = waiting.pop(0)
            places, pair = [_Place(i, j, seen)], _Pair(rows[i], columns[j], [])
            for other in [*waiting]:
                if not (other[2] & seen).any():
                    waiting.remove(other)
                    pair = _Pair(
                        self._either(seen, pair.rows, rows[other[0]]),
                        self._either(seen, pair.columns, columns[other[1]]),
                        [],
                    )
                    seen = seen | other[2]
                    places.append(_Place(*other))
            found.append(pair._replace(places=places))
        return found

    def _seen_by(self, rows: Chunk, columns: Chunk) -> np.ndarray:
        """By part, whether some row sees some column."""
        if not self._causal:
            return np.ones(self.parts, bool)
        hidden = is_hidden(self.trees.scores, rows.ends(), columns.ends())
        return ~np.broadcast_to(np.asarray(hidden, bool), (self.parts,))

    def _either(self, first: np.ndarray, one: Chunk, other: Chunk) -> Chunk:
        """By part, one chunk or the other."""
        if one is other:
            return one
        flags = self._flags(first)
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

    def block(self, pair: _Pair) -> ScoreBlock:
        """The block of a pair, without choices that all of its entries make alike."""
        ends = pair.rows.ends(), pair.columns.ends()
        scores, weights, *gradients = self.trees
        return ScoreBlock(
            pair.rows,
            pair.columns,
            Trees(
                simplified(scores, *ends),
                simplified(weights, *ends),
                *(None if tree is None else simplified(tree, *ends) for tree in gradients),
            ),
        )

    def scores(self, block: ScoreBlock) -> Tensor:
        """The product of q and k, computed when the block before is done."""
        return self._in_turn(
            self._product(block.rows.tensors[0], block.columns.tensors[0], adj_y=True)
        )

    def _in_turn(self, made: Tensor) -> Tensor:
        """Have the first product of a block wait for the block before."""
        made.op.control += self._awaited
        return made

    def done(self, *made: object) -> None:
        """Note what the next block waits for: the last tensors that were made of the one before."""
        tensors = [m.values if isinstance(m, _Seen) else m for m in made]
        self._awaited = list(dict.fromkeys(t.op for t in tensors if isinstance(t, Tensor)))

    def _product(self, x: Tensor, y: Tensor, adj_x: bool = False, adj_y: bool = False) -> Tensor:
        rows = x.shape[-1] if adj_x else x.shape[-2]
        columns = y.shape[-2] if adj_y else y.shape[-1]
        attrs = {
            "T": DType(x.dtype),
            "adj_x": adj_x,
            "adj_y": adj_y,
            "grad_x": False,
            "grad_y": False,
        }
        shape = (*x.shape[:-2], rows, columns)
        return self.build.one("BatchMatMulV2", (x, y), shape, x.dtype, attrs)

    def seen(self, block: ScoreBlock, scores: Tensor, dtype: str) -> _Seen:
        """The state of rows that have seen one block."""
        build = self.build
        logits = self._entries(block, block.trees.scores, {SCORES: scores})
        lowest = build.const(np.finfo(numpy_dtype(dtype)).min, dtype)
        largest = build.binary("Maximum", build.reduce("Max", logits, [-1], keep_dims=True), lowest)
        weights = build.unary("Exp", build.binary("Sub", logits, largest))
        total = build.reduce("Sum", weights, [-1], keep_dims=True)
        handed_on = self._entries(block, block.trees.weights, {SCORES: scores, WEIGHTS: weights})
        values = self._product(handed_on, block.columns.tensors[1])
        return _Seen(largest, total, build.cast(values, dtype))

    def merged(self, before: _Seen | None, made: _Seen, keep: np.ndarray | None) -> _Seen:
        """The state of rows with one block more, of the parts in `keep`."""
        build = self.build
        if keep is not None:
            dtype = made.largest.dtype
            lowest = build.const(np.finfo(numpy_dtype(dtype)).min, dtype)
            made = made._replace(largest=build.select(self._flags(keep), made.largest, lowest))
        if before is None:
            if keep is None:
                return made
            zero = build.const(0, made.total.dtype)
            flags = self._flags(keep)
            return _Seen(
                made.largest,
                build.select(flags, made.total, zero),
                build.select(flags, made.values, zero),
            )
        largest = build.binary("Maximum", before.largest, made.largest)
        old, new = (
            build.unary("Exp", build.binary("Sub", each.largest, largest))
            for each in (before, made)
        )
        total, values = (
            build.binary("AddV2", build.binary("Mul", a, old), build.binary("Mul", b, new))
            for a, b in zip(before[1:], made[1:], strict=True)
        )
        return _Seen(largest, total, values)

    def gradients(self, block: ScoreBlock, dtype: str) -> _Gradients:
        """Gradients of the operands of a block."""
        build, trees = self.build, block.trees
        q, largest, total, gradient, mean = block.rows.tensors
        k, v = block.columns.tensors
        assert trees.weights_gradient is not None and trees.scores_gradient is not None
        scores = self.scores(block)
        logits = self._entries(block, trees.scores, {SCORES: scores})
        weights = build.binary(
            "RealDiv", build.unary("Exp", build.binary("Sub", logits, largest)), total
        )
        known = {SCORES: scores, WEIGHTS: weights}
        of_v = self._product(self._entries(block, trees.weights, known), gradient, adj_x=True)
        of_weights = self._in_turn(self._product(gradient, v, adj_y=True))
        of_weights = self._entries(block, trees.weights_gradient, known | {GRADIENT: of_weights})
        of_logits = build.binary("Mul", build.binary("Sub", of_weights, mean), weights)
        of_scores = self._entries(block, trees.scores_gradient, known | {GRADIENT: of_logits})
        of_q = self._product(of_scores, k)
        of_k = self._product(of_scores, q, adj_x=True)
        return _Gradients(*(build.cast(t, dtype) for t in (of_q, of_k, of_v)))

    def added(self, before: Tensor | None, made: Tensor, keep: np.ndarray | None) -> Tensor:
        """A sum with one block more, of the parts in `keep`."""
        if keep is not None:
            made = self.build.select(self._flags(keep), made, self.build.const(0, made.dtype))
        return made if before is None else self.build.binary("AddV2", before, made)

    # --- entries ----------------------------------------------------------------------------

    def _entries(
        self, block: ScoreBlock, tree: Expression, variables: Mapping[str, Tensor]
    ) -> Tensor:
        """The entries of a block that `tree` says."""
        shape = next(iter(variables.values())).shape
        found = Entries(self.build, block, variables).of(tree)
        if found.shape == shape:
            return found
        attrs = {"T": DType(found.dtype), "Tidx": DType("int32")}
        sizes = self.build.shape_const(shape)
        return self.build.one("BroadcastTo", (found, sizes), shape, found.dtype, attrs)


def _can_halve(length: int, parts: int, chunks: int) -> bool:
    """Whether chunks are long enough to be cut in two, and not too many."""
    each = length // (parts * chunks)
    even = length % (2 * parts * chunks) == 0
    return even and each > LONGEST and 2 * parts * chunks <= MOST_CHUNKS


def _zigzag(chunk: int, parts: int) -> int:
    """The part that has a chunk of `2 * parts`."""
    return min(chunk, 2 * parts - 1 - chunk)
