"""Entries of an attention's scores as trees (`ir.attention.Expression`), read off a graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfpar.ir.attention import Apply, EntryPosition, Expression, Number, Operand, Table
from tfpar.ir.constants import Constants
from tfpar.ir.graph import DType, Op, Tensor
from tfpar.ir.traits import ELEMENTWISE, VIEWS

Dims = tuple[int | None, ...]
"""The dim of the scores that each dim of a tensor is; None for one of size 1."""

GIVEN = ("Placeholder", "ReadVariableOp")
"""Types of ops that give an entry for each row and column, such as a mask that is fed."""


_OF_ONE_SHAPE = ("Fill", "Select", "BiasAdd")
"""Types of elementwise ops that want operands of other ranks than blocks have."""


class Layout(NamedTuple):
    """A tensor, and the dim of the scores that each of its dims is, or `FEATURES`."""

    tensor: Tensor
    dims: tuple[int | None, ...]


class NotAttentionError(Exception):
    """A softmax is not that of an attention which is known."""


def need(holds: object) -> None:
    """Go on if it holds.

    Raises:
        NotAttentionError: it does not.
    """
    if not holds:
        raise NotAttentionError


class EntryReader:
    """Reader of the entries of one attention's scores.

    Args:
        shape: of the scores, `(*batch, row, column)`.

    Attributes:
        every: all dims of the scores.
        operands: what the trees read.
    """

    def __init__(self, shape: Sequence[int], constants: Constants) -> None:
        self.constants = constants
        self.rank = len(shape)
        self.row, self.column = self.rank - 2, self.rank - 1
        self.every: Dims = tuple(range(self.rank))
        self.operands: list[Layout] = []
        self._names: Mapping[Tensor, Expression] = {}

    def read(self, tensor: Tensor, dims: Dims, names: Mapping[Tensor, Expression]) -> Expression:
        """Return what the entries of a tensor, of these dims, are made of.

        Args:
            names: tensors that trees do not look behind.

        Raises:
            NotAttentionError: of something else than entries.
        """
        self._names = names
        return self.tree(tensor, dims)

    def permutation(self, op: Op) -> list[int]:
        """Return the permutation of a Transpose.

        Raises:
            NotAttentionError: it is not known.
        """
        perm = self.constants.value(op.inputs[1])
        if perm is None:
            raise NotAttentionError
        return [int(p) for p in perm]

    def inputs(self, op: Op, dims: Dims) -> list[tuple[Tensor, Dims]]:
        """The operands of an op that gives a tensor of `dims`, each with its dims.

        Raises:
            NotAttentionError: it does not work entry by entry.
        """
        need(len(op.outputs) == 1)
        shape = op.outputs[0].shape
        if op.type == "Transpose":
            before: list[int | None] = [None] * len(dims)
            for i, p in enumerate(self.permutation(op)):
                before[p] = dims[i]
            return [(op.inputs[0], tuple(before))]
        if op.type == "BroadcastTo":
            return [(op.inputs[0], _aligned(dims, shape, op.inputs[0].shape))]
        if op.type == "StridedSlice" or op.type in VIEWS:
            (source, *others) = op.inputs
            if op.type == "StridedSlice":  # all of it, and not the other way round
                strides = self.constants.value(others[2])
                need(strides is not None and (strides > 0).all())
            need(source.is_static and math.prod(source.shape) == math.prod(shape))
            made = reshaped(shape, dims, source.shape)
            need(made is not None)
            assert made is not None
            return [(source, made)]
        need(op.type in ELEMENTWISE and op.type not in _OF_ONE_SHAPE)
        return [(t, _aligned(dims, shape, t.shape)) for t in op.inputs]

    def tree(self, tensor: Tensor, dims: Dims) -> Expression:
        """Return the tree of the entries of a tensor of these dims; see `read`."""
        if tensor in self._names:
            return self._names[tensor]
        op = tensor.op
        constant = self.constants.value(tensor)
        if constant is not None and _is_uniform(constant):
            return Number(constant.flat[0].item(), tensor.dtype)
        known = self.positional(op, dims)
        if known is not None:
            return known
        if constant is not None:
            try:
                return self._made_of(tensor, dims)  # which says more of blocks
            except NotAttentionError:
                return Table(_placed(constant, dims, self.rank), tensor.dtype)
        if not (self.row in dims and self.column in dims) and not self._reads_names(tensor):
            return self._operand(Layout(tensor, dims))
        return self._made_of(tensor, dims)

    def _made_of(self, tensor: Tensor, dims: Dims) -> Expression:
        """The tree of entries that are computed."""
        op = tensor.op
        if op.type in GIVEN:
            return self._operand(Layout(tensor, dims))
        made = [self.tree(t, own) for t, own in self.inputs(op, dims)]
        if op.type not in ELEMENTWISE or op.type == "BroadcastTo":
            return made[0]
        if op.type == "AddN":  # which does not broadcast what is left of a choice
            typed = _typed(tensor.dtype)
            return functools.reduce(lambda a, b: Apply("AddV2", (a, b), typed, tensor.dtype), made)
        attrs = tuple(sorted((k, v) for k, v in op.attrs.items() if not k.startswith("_")))
        return Apply(op.type, tuple(made), attrs, tensor.dtype)

    def _reads_names(self, tensor: Tensor) -> bool:
        """Whether a tensor, without rows or columns, is made of what is not an operand."""
        return tensor.dtype in ("resource", "variant") or not tensor.is_static

    def _operand(self, layout: Layout) -> Operand:
        if layout not in self.operands:
            self.operands.append(layout)
        return Operand(self.operands.index(layout), layout.tensor.dtype)

    def positional(self, op: Op, dims: Dims) -> Expression | None:
        """The tree of entries that follow from where they are; None if these do not."""
        (made, *_) = op.outputs
        if op.type == "Fill":
            value = self.constants.value(op.inputs[1])
            return None if value is None else Number(value.item(), made.dtype)
        if op.type == "ZerosLike":
            return Number(0, made.dtype)
        if op.type == "Range":
            start, _, delta = (self.constants.value(t) for t in op.inputs)
            if start is None or delta is None:
                return None
            return self._along(dims[0], delta.item(), start.item(), made.dtype)
        if op.type == "Cumsum":
            axis, one = self.constants.value(op.inputs[1]), self._uniform(op.inputs[0])
            plain = not (op.attrs.get("exclusive") or op.attrs.get("reverse"))
            if axis is None or one is None or not plain:
                return None
            return self._along(dims[int(axis)], one, one, made.dtype)
        if op.type == "MatrixBandPart":
            ends = [self.constants.value(t) for t in op.inputs[1:]]
            one = self._uniform(op.inputs[0])
            need(dims[-2:] == (self.row, self.column))
            if one is None or any(e is None for e in ends):
                return None
            inside: Expression = Number(True, "bool")
            for sign, end in zip((1, -1), ends, strict=True):
                assert end is not None
                if int(end) >= 0:
                    off = EntryPosition(sign, -sign, 0, "int32")
                    limit = Number(int(end), "int32")
                    one_side = Apply("LessEqual", (off, limit), _typed("int32"), "bool")
                    inside = Apply("LogicalAnd", (inside, one_side), (), "bool")
            if made.dtype == "bool":
                return inside if one else Number(False, "bool")
            pair = Number(one, made.dtype), Number(0, made.dtype)
            return Apply("SelectV2", (inside, *pair), _typed(made.dtype), made.dtype)
        return None

    def _along(self, dim: int | None, step: float, offset: float, dtype: str) -> Expression | None:
        if dim is None:
            return Number(offset, dtype)
        if dim not in (self.row, self.column) or not (step == int(step) and offset == int(offset)):
            return None
        by_row, by_column = (int(step) * (dim == own) for own in (self.row, self.column))
        return EntryPosition(by_row, by_column, int(offset), dtype)

    def _uniform(self, tensor: Tensor) -> float | bool | None:
        """The number that all entries of a constant are; None if they differ or are not known."""
        if tensor.op.type == "Fill":
            tensor = tensor.op.inputs[1]
        value = self.constants.value(tensor)
        if value is None or not _is_uniform(value):
            return None
        found: float | bool = value.flat[0].item()
        return found


def _is_uniform(value: np.ndarray) -> bool:
    return value.size > 0 and bool((value == value.flat[0]).all())


def _typed(dtype: str) -> tuple[tuple[str, DType], ...]:
    """The attribute of an op of TensorFlow's that says of which dtype its operands are."""
    return (("T", DType(dtype)),)


def _aligned(dims: Dims, shape: Sequence[int], own: Sequence[int]) -> Dims:
    """The dims of an operand of shape `own` that is broadcast to a tensor of `dims` and `shape`."""
    behind = len(shape) - len(own)
    return tuple(
        None if n == 1 < made else d
        for d, made, n in zip(dims[behind:], shape[behind:], own, strict=True)
    )


def reshaped(shape: Sequence[int], dims: Dims, other: Sequence[int]) -> Dims | None:
    """The dims of a tensor of `dims` in another shape with the same dims, but for those of size
    1; None if it has others."""
    if tuple(shape) == tuple(other):
        return dims
    sized = [(n, d) for n, d in zip(shape, dims, strict=True) if n != 1]
    if [n for n, _ in sized] != [n for n in other if n != 1]:
        return None
    left = iter(sized)
    return tuple(None if n == 1 else next(left)[1] for n in other)


def _placed(value: np.ndarray, dims: Dims, rank: int) -> np.ndarray:
    """A constant with as many dims as the scores."""
    kept = [i for i, d in enumerate(dims) if d is not None]
    value = value.reshape([value.shape[i] for i in kept])
    own = [d for d in dims if d is not None]
    order = sorted(range(len(own)), key=lambda i: own[i])
    shape = [1] * rank
    for i in order:
        shape[own[i]] = value.shape[i]
    placed: np.ndarray = value.transpose(order).reshape(shape)
    return placed
