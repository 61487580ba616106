"""Chunks of the positions of an attention, blocks of its scores, and what their entries are: parts
of the decomposition of `rules.attention_blocks`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tfpar.ir.attention import (
    Apply,
    EntryPosition,
    EntryVariable,
    Expression,
    Number,
    Operand,
    Table,
    Trees,
)
from tfpar.ir.builder import GraphBuilder, numpy_dtype
from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule

COLUMNS = "TfparColumns"
"""Op type: of rows that have all columns, those of another part, by part."""

PERMUTATION = "TfparPermutation"
"""Op type: blocks of the third last dim change places."""


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """Some positions of every part, as rows or as columns.

    Attributes:
        tensors: what there is of them, (*batch, parts, length, features) each.
        operands: of masks, by index: one entry for each position, or for all.
        starts: the first position, by part.
        length: the number of positions.
    """

    tensors: tuple[Tensor, ...]
    operands: Mapping[int, Tensor]
    starts: np.ndarray
    length: int

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The first and the last position, by part."""
        return self.starts, self.starts + self.length - 1


class ScoreBlock(NamedTuple):
    """A block of scores, and the trees of its entries."""

    rows: Chunk
    columns: Chunk
    trees: Trees


class Entries:
    """Writer of the entries of one block."""

    def __init__(
        self, build: GraphBuilder, block: ScoreBlock, variables: Mapping[str, Tensor]
    ) -> None:
        self._build, self._block, self._variables = build, block, variables

    def of(self, tree: Expression) -> Tensor:
        """Return what `tree` says."""
        match tree:
            case EntryVariable(name):
                return self._variables[name]
            case Operand(index):
                return self._operand(index)
            case Number(value, dtype):
                return self._build.const(value, dtype)
            case EntryPosition():
                return self._position(tree)
            case Table(values, dtype):
                return self._build.const(self._of_table(values), dtype)
            case Apply(kind, inputs, attrs, dtype):
                operands = [self.of(each) for each in inputs]
                shapes = [o.shape for o in operands if o.shape]
                shape = np.broadcast_shapes(*shapes) if shapes else ()
                return self._build.one(kind, operands, shape, dtype, dict(attrs))
        raise AssertionError(tree)

    def _operand(self, index: int) -> Tensor:
        if index in self._block.rows.operands:
            row = self._block.rows.operands[index]
            return row if row.shape[-1] == 1 else self._columns_of(row)
        column = self._block.columns.operands[index]
        return self._build.reshape(column, (*column.shape[:-2], 1, column.shape[-2]))

    def _columns_of(self, x: Tensor) -> Tensor:
        """The columns of the block, of rows that have all."""
        columns = self._block.columns
        attrs = {"starts": tuple(map(int, columns.starts)), "length": columns.length}
        shape = (*x.shape[:-1], columns.length)
        return self._build.one(COLUMNS, (x,), shape, x.dtype, attrs)

    def _position(self, position: EntryPosition) -> Tensor:
        dtype = numpy_dtype(position.dtype)
        found: Tensor | None = None
        for factor, chunk, own in (
            (position.row, self._block.rows, (-1, 1)),
            (position.column, self._block.columns, (1, -1)),
        ):
            if factor:
                at = chunk.starts[:, None] + np.arange(chunk.length)
                offset = position.offset if found is None else 0
                values = (factor * at + offset).astype(dtype)
                made = self._build.const(values.reshape(len(at), *own), position.dtype)
                found = made if found is None else self._build.binary("AddV2", found, made)
        return self._build.const(position.offset, position.dtype) if found is None else found

    def _of_table(self, values: np.ndarray) -> np.ndarray:
        def along(chunk: Chunk, part: int, length: int) -> slice:
            start = int(chunk.starts[part])
            return slice(None) if length == 1 else slice(start, start + chunk.length)

        *_, rows, columns = values.shape
        made = [
            values[
                ...,
                along(self._block.rows, part, rows),
                along(self._block.columns, part, columns),
            ]
            for part in range(len(self._block.rows.starts))
        ]
        return np.stack(made, axis=-3)


# --- columns of a mask ----------------------------------------------------------------------


@rule(COLUMNS)
def _columns(op: Op, constants: Constants) -> OpRule:
    *batch, parts, rows, _ = (f"d{d}" for d in range(len(op.inputs[0].shape)))
    kept = " ".join([*batch, parts, rows])
    return make_rule(op, f"{kept} . -> {kept} .", lower=_lower_columns, pseudo=True)


def _lower_columns(local: LocalOp) -> list[Tensor]:
    (x,), attrs = local.inputs, local.op.attrs
    starts, at = attrs["starts"], len(x.shape) - 3
    size = [*x.shape[:-1], attrs["length"]]
    if not local.axes(f"d{at}"):
        parts: list[Tensor] = []
        size[at] = 1
        for part, start in enumerate(starts):
            first = [0] * len(size)
            first[at], first[-1] = part, start
            parts.append(local.build.slice(x, first, size))
        return [local.build.concat(parts, at)]
    begins = [np.zeros(len(size), np.int32) for _ in range(local.mesh.size)]
    for begin, part in zip(begins, local.starts(f"d{at}"), strict=True):
        begin[-1] = starts[part]
    return [local.build.slice(x, local.build.per_rank(begins), size)]


# --- blocks that change places --------------------------------------------------------------


@rule(PERMUTATION)
def _permutation(op: Op, constants: Constants) -> OpRule:
    rank = len(op.inputs[0].shape)
    names = [f"d{d}" for d in range(rank)]
    names[rank - 3] = "parts"
    side = " ".join(names)
    return make_rule(
        op,
        f"{side} -> {side}",
        monotone=(0,),
        lower=_lower_permutation,
        pseudo=True,
        permutes="parts",
    )


def _lower_permutation(local: LocalOp) -> list[Tensor]:
    (x,), targets = local.inputs, local.op.attrs["targets"]
    axes = local.axes("parts")
    if not axes:
        sources = [targets.index(p) for p in range(len(targets))]
        return [
            local.build.take(x, local.build.const(np.array(sources, np.int32)), len(x.shape) - 3)
        ]
    attrs = {"axes": axes, "targets": targets}
    return [local.build.one("Permute", (x,), x.shape, x.dtype, attrs)]
