"""Attention as one op, which works on blocks of its scores: op types, and what each entry goes
through.

    o = softmax(f(q k^T)) v           f: a scale, a mask, a cap on the scores
    o = g(softmax(f(q k^T))) v        g: linear, say a mask of what comes out

Operands have the shape (*batch, positions, features). `f`, `g` and their gradients are trees
(`Expression`) over the entries of one block, so that a mask which follows from positions is never
made for all of them. `ir.passes.fuse_attention` writes these ops, and `rules.attention` says how
they run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfpar.ir.graph import Op

ATTENTION = "TfparAttention"
"""Reads q, k, v, and operands of masks; gives the result, and for each row of scores its maximum
and the sum of exp(score - maximum)."""

ATTENTION_GRADIENT = "TfparAttentionGradient"
"""Reads q, k, v, what `ATTENTION` gave, the gradient of the result, and operands of masks; gives
the gradients of q, k and v."""

TREES = "trees"
"""Attribute of these ops: what entries go through, as `Trees.values` writes it."""

SCORES, GRADIENT = "scores", "gradient"
"""Names of `EntryVariable` leaves: what the product of q and k gives, and a gradient that comes
in."""

WEIGHTS = "weights"
"""Name of the leaf that is the softmax of the scores."""


@dataclasses.dataclass(frozen=True)
class EntryVariable:
    """A block that the op computes: `SCORES`, `WEIGHTS` or `GRADIENT`."""

    name: str


@dataclasses.dataclass(frozen=True)
class Operand:
    """An input of the op, with as many dims as the scores; of size 1 where entries are the same.

    Attributes:
        index: among the operands of masks.
    """

    index: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class EntryPosition:
    """`row * i + column * j + offset` of the entry in row i and column j."""

    row: int
    column: int
    offset: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Number:
    """The same number for every entry."""

    value: float | bool
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A constant with as many dims as the scores."""

    values: np.ndarray
    dtype: str

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table) or self.dtype != other.dtype:
            return False
        return np.array_equal(self.values, other.values)

    def __hash__(self) -> int:
        return hash((self.values.shape, self.dtype))

    def __repr__(self) -> str:
        return f"Table({self.dtype}{list(self.values.shape)})"


@dataclasses.dataclass(frozen=True)
class Apply:
    """An elementwise op.

    Attributes:
        attrs: of the op, in the order of their names.
        dtype: of what it gives.
    """

    type: str
    inputs: tuple[Expression, ...]
    attrs: tuple[tuple[str, Any], ...]
    dtype: str


_KINDS: Mapping[str, Any] = {
    kind.__name__: kind for kind in (EntryVariable, Operand, EntryPosition, Number, Table, Apply)
}

Expression = EntryVariable | Operand | EntryPosition | Number | Table | Apply


class Trees(NamedTuple):
    """Trees that the entries of an attention go through.

    Attributes:
        scores: of `SCORES`, before the softmax.
        weights: of `WEIGHTS`, behind it; linear in them.
        weights_gradient: of `GRADIENT`, that of what `weights` gives: the gradient of `WEIGHTS`.
        scores_gradient: of `GRADIENT`, that of what `scores` gives: the gradient of `SCORES`.
    """

    scores: Expression
    weights: Expression
    weights_gradient: Expression | None = None
    scores_gradient: Expression | None = None

    def values(self) -> list[Any]:
        """Write the trees as lists of plain values, as attributes of ops are."""
        return [None if tree is None else _values(tree) for tree in self]

    @classmethod
    def of(cls, op: Op) -> Trees:
        """Read the trees of an op."""
        scores, weights, *gradients = op.attrs[TREES]
        return cls(
            _tree(scores),
            _tree(weights),
            *(None if value is None else _tree(value) for value in gradients),
        )


def _values(tree: Expression) -> list[Any]:
    fields = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    if isinstance(tree, Apply):
        fields[1] = [_values(each) for each in tree.inputs]
        fields[2] = [[name, value] for name, value in tree.attrs]
    return [type(tree).__name__, *fields]


def _tree(values: list[Any]) -> Expression:
    name, *fields = values
    if name == Apply.__name__:
        fields[1] = tuple(map(_tree, fields[1]))
        fields[2] = tuple((name, value) for name, value in fields[2])
    found: Expression = _KINDS[name](*fields)
    return found


# --- bounds -------------------------------------------------------------------------------------

Range = tuple[Any, Any]
"""The least and the greatest value, for each row that is looked at."""

SCORE_LIMIT = 1e6
"""Scores and gradients of this size or more are taken for masked ones."""

HIDDEN = -1e7
"""A score that is at most this, in a row with one that is not masked, has a weight of exactly 0."""


def bounds(tree: Expression, rows: Range, columns: Range) -> Range:
    """Bound the values of `tree` over blocks of entries.

    Args:
        rows, columns: the first and the last of each block: numbers, or arrays of them.
    """
    if isinstance(tree, Number):
        value = float(tree.value)
        return value, value
    if isinstance(tree, EntryPosition):
        (first, last), (left, right) = _scaled(tree.row, rows), _scaled(tree.column, columns)
        return tree.offset + first + left, tree.offset + last + right
    if isinstance(tree, EntryVariable):
        return -SCORE_LIMIT, SCORE_LIMIT
    if isinstance(tree, Table):
        return _bounds_of_table(tree.values, rows, columns)
    if isinstance(tree, Apply):
        found = [bounds(each, rows, columns) for each in tree.inputs]
        if tree.type == "Cast":
            return _cast(found[0], tree.dtype)
        if tree.type in _BOUNDS:
            return _BOUNDS[tree.type](*found)
    if tree.dtype == "bool":
        return 0.0, 1.0
    return -np.inf, np.inf


def _bounds_of_table(values: np.ndarray, rows: Range, columns: Range) -> Range:
    values = values.reshape(-1, *values.shape[-2:]).astype(float)
    ends = np.broadcast_arrays(*rows, *columns)
    whole = [n == 1 for n in values.shape[1:]]
    found = []
    for first, last, left, right in zip(*(e.ravel() for e in ends), strict=True):
        block = values[:, slice(None) if whole[0] else slice(first, last + 1)]
        block = block[:, :, slice(None) if whole[1] else slice(left, right + 1)]
        found.append((block.min(), block.max()))
    shape = ends[0].shape
    least, most = zip(*found, strict=True)
    return np.reshape(least, shape), np.reshape(most, shape)


def _scaled(factor: int, ends: Range) -> Range:
    least, most = (0, 1) if factor >= 0 else (1, 0)
    return factor * ends[least], factor * ends[most]


def _cast(ends: Range, dtype: str) -> Range:
    least, most = ends
    if dtype == "bool":  # whether it is not 0
        return (np.greater(least, 0) | np.less(most, 0)), (
            np.not_equal(least, 0) | np.not_equal(most, 0)
        )
    if "int" in dtype:
        return np.trunc(least), np.trunc(most)
    return ends


def _select(condition: Range, yes: Range, no: Range) -> Range:
    least = np.where(condition[0], yes[0], np.where(condition[1], np.minimum(yes[0], no[0]), no[0]))
    most = np.where(condition[0], yes[1], np.where(condition[1], np.maximum(yes[1], no[1]), no[1]))
    return least, most


def _product(a: Range, b: Range) -> Range:
    with np.errstate(invalid="ignore"):
        ends = [np.nan_to_num(x * y, nan=0.0, posinf=np.inf, neginf=-np.inf) for x in a for y in b]
    return np.minimum.reduce(ends), np.maximum.reduce(ends)


_BOUNDS: Mapping[str, Callable[..., Range]] = {
    "Identity": lambda a: a,
    "AddV2": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "Add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "Sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "Neg": lambda a: (-a[1], -a[0]),
    "Mul": _product,
    "Maximum": lambda a, b: (np.maximum(a[0], b[0]), np.maximum(a[1], b[1])),
    "Minimum": lambda a, b: (np.minimum(a[0], b[0]), np.minimum(a[1], b[1])),
    "GreaterEqual": lambda a, b: (a[0] >= b[1], a[1] >= b[0]),
    "Greater": lambda a, b: (a[0] > b[1], a[1] > b[0]),
    "LessEqual": lambda a, b: (a[1] <= b[0], a[0] <= b[1]),
    "Less": lambda a, b: (a[1] < b[0], a[0] < b[1]),
    "LogicalAnd": lambda a, b: (np.logical_and(a[0], b[0]), np.logical_and(a[1], b[1])),
    "LogicalOr": lambda a, b: (np.logical_or(a[0], b[0]), np.logical_or(a[1], b[1])),
    "LogicalNot": lambda a: (np.logical_not(a[1]), np.logical_not(a[0])),
    "SelectV2": _select,
    "Tanh": lambda a: (np.tanh(a[0]), np.tanh(a[1])),
}


def is_hidden(tree: Expression, rows: Range, columns: Range) -> Any:
    """Whether all scores of blocks are masked; `tree` gives them."""
    return bounds(tree, rows, columns)[1] <= HIDDEN


@functools.lru_cache(maxsize=1024)
def is_causal(tree: Expression, length: int) -> bool:
    """Whether none of `length` positions sees one behind it, and each sees itself, whatever data
    says: then what is hidden weighs nothing."""
    every = np.arange(length)
    rows = every[:-1]
    behind = rows + 1, np.full(length - 1, length - 1)
    if not np.all(is_hidden(tree, (rows, rows), behind)):
        return False
    return bool(np.all(bounds(tree, (every, every), (every, every))[0] > -2 * SCORE_LIMIT))


def simplified(tree: Expression, rows: Range, columns: Range) -> Expression:
    """Return `tree` without choices that are the same for all entries of some blocks."""
    if not isinstance(tree, Apply):
        return tree
    if tree.type == "SelectV2":
        least, most = bounds(tree.inputs[0], rows, columns)
        if np.all(least):
            return simplified(tree.inputs[1], rows, columns)
        if not np.any(most):
            return simplified(tree.inputs[2], rows, columns)
    inputs = tuple(simplified(each, rows, columns) for each in tree.inputs)
    return dataclasses.replace(tree, inputs=inputs)
