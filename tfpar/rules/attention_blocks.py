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

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tfpar.ir.attention import (
    GRADIENT,
    SCORES,
    WEIGHTS,
    Expression,
    Trees,
    simplified,
)
from tfpar.ir.builder import numpy_dtype
from tfpar.ir.graph import DType, Graph, Op, Tensor
from tfpar.rules.attention_chunks import Entries, ScoreBlock
from tfpar.rules.attention_parts import Pair, Parts
from tfpar.rules.pseudo import begin_decomposition


def expand_attention(op: Op, parts: int) -> Graph:
    """Build the graph that `ATTENTION` stands for, with positions in so many parts."""
    build, inputs = begin_decomposition(op, "attention")
    q, k, v, *operands = inputs
    trees, lengths = Trees.of(op), (q.shape[-2], k.shape[-2])
    ring = Parts(build, trees.scores, lengths, parts)
    blocks = _Blocks(ring, trees)
    rows = ring.rows([q], operands)
    columns = ring.columns([k, v], operands)
    dtype = op.outputs[1].dtype
    seen: list[_Seen | None] = [None] * len(rows)
    for turn in range(parts):
        for pair in ring.pairs(rows, columns):
            made = blocks.seen(blocks.block(pair), dtype)
            for place in pair.places:
                seen[place.row] = blocks.merged(seen[place.row], made, place.keep)
            blocks.done(*seen)
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
    trees, lengths = Trees.of(op), (q.shape[-2], k.shape[-2])
    ring = Parts(build, trees.scores, lengths, parts)
    blocks = _Blocks(ring, trees)
    product = build.binary("Mul", build.cast(gradient, dtype), build.cast(result, dtype))
    mean = build.reduce("Sum", product, [-1], keep_dims=True)
    blocks.done(mean)
    rows = ring.rows([q, largest, total, gradient, mean], operands)
    columns = ring.columns([k, v], operands)
    of_q: list[Tensor | None] = [None] * len(rows)
    of_columns: list[tuple[Tensor, Tensor] | None] = [None] * len(columns)
    for turn in range(parts):
        for pair in ring.pairs(rows, columns):
            each = blocks.gradients(blocks.block(pair), dtype)
            for place in pair.places:
                of_q[place.row] = blocks.added(of_q[place.row], each.q, place.keep)
                before = of_columns[place.column] or (None, None)
                own = [
                    blocks.added(b, t, place.keep)
                    for b, t in zip(before, (each.k, each.v), strict=True)
                ]
                of_columns[place.column] = own[0], own[1]
            blocks.done(*of_q, *itertools.chain(*filter(None, of_columns)))
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


class _Blocks:
    """Writer of what is computed of each block, one block after another."""

    def __init__(self, parts: Parts, trees: Trees) -> None:
        self.build, self._parts, self._trees = parts.build, parts, trees
        self._awaited: list[Op] = []

    def block(self, pair: Pair) -> ScoreBlock:
        """The block of a pair, without choices that all of its entries make alike."""
        ends = pair.rows.ends(), pair.columns.ends()
        scores, weights, *gradients = self._trees
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

    def seen(self, block: ScoreBlock, dtype: str) -> _Seen:
        """The state of rows that have seen one block."""
        build, scores = self.build, self.scores(block)
        logits = self._entries(block, block.trees.scores, {SCORES: scores})
        largest = build.reduce("Max", logits, [-1], keep_dims=True)
        largest = build.binary("Maximum", largest, self._lowest(dtype))
        weights = build.unary("Exp", build.binary("Sub", logits, largest))
        total = build.reduce("Sum", weights, [-1], keep_dims=True)
        handed_on = self._entries(block, block.trees.weights, {SCORES: scores, WEIGHTS: weights})
        values = self._product(handed_on, block.columns.tensors[1])
        return _Seen(largest, total, build.cast(values, dtype))

    def _lowest(self, dtype: str) -> Tensor:
        """The score of what is not there."""
        return self.build.const(np.finfo(numpy_dtype(dtype)).min, dtype)

    def merged(self, before: _Seen | None, made: _Seen, keep: np.ndarray | None) -> _Seen:
        """The state of rows with one block more, of the parts in `keep`."""
        build = self.build
        if keep is not None:
            lowest = self._lowest(made.largest.dtype)
            made = made._replace(
                largest=build.select(self._parts.flags(keep), made.largest, lowest)
            )
        if before is None:
            if keep is None:
                return made
            zero = build.const(0, made.total.dtype)
            flags = self._parts.flags(keep)
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
            made = self.build.select(self._parts.flags(keep), made, self.build.const(0, made.dtype))
        return made if before is None else self.build.binary("AddV2", before, made)

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
