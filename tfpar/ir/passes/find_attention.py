"""Attention in a graph: a softmax between two matrix products, and its gradient.

    %s = Einsum(%q, %k)                              %g = Einsum(%do, %v)
    ...                   scale, mask                ...
    %p = Softmax(%l)                                 %r = Mul(%g, %p)
    ...                   mask                       %d = Mul(Sub(%g, Sum(%r)), %p)
    %o = Einsum(%p', %v)                             ...
                                                     %dq = Einsum(%ds, %k), %dk, %dv

It is told by what ops do, not by the layer that they are of. All between the products has to work
entry by entry, on the scores and on what follows from positions, from the row, from the column or
from nothing. Random numbers for each entry (a dropout of weights) do not, nor a bias that is
learned for each.

Tensors are written down in the dims of the scores: `(*batch, row, column)`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfpar.ir.attention import (
    GRADIENT,
    SCORES,
    WEIGHTS,
    Apply,
    Expression,
    Number,
    Operand,
    Position,
    Table,
    Trees,
    Variable,
)
from tfpar.ir.constants import Constants
from tfpar.ir.graph import DType, Graph, Op, Tensor
from tfpar.ir.traits import ELEMENTWISE, MATRIX_PRODUCTS, UNCHANGED, VIEWS

Dims = tuple[int | None, ...]
"""The dim of the scores that each dim of a tensor is; None for one of size 1."""

FEATURES = -1
"""In place of a dim of the scores: what the products of q and k, or of v, sum or hand on."""


class Layout(NamedTuple):
    """A tensor, and the dim of the scores that each of its dims is, or `FEATURES`."""

    tensor: Tensor
    dims: tuple[int | None, ...]


class GradientTensors(NamedTuple):
    """The gradients of an attention.

    Attributes:
        result: that of its result, which comes in.
        q, k, v: those of its operands.
    """

    result: Layout
    q: Layout
    k: Layout
    v: Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """One attention of a graph.

    Attributes:
        softmax: its softmax.
        q, k, v: its operands, and `result`, what it gives.
        trees: what entries go through.
        operands: what `trees` read.
        gradient: None if the graph has no gradient of it.
    """

    softmax: Op
    q: Layout
    k: Layout
    v: Layout
    result: Layout
    trees: Trees
    operands: Sequence[Layout]
    gradient: GradientTensors | None


def find_attentions(graph: Graph) -> list[Attention]:
    """Find all attentions of a graph whose scores can be computed in blocks."""
    constants, readers = Constants(graph), graph.consumers()
    outputs = {*graph.outputs}
    found = []
    for op in graph.ops:
        if op.type == "Softmax" and len(op.outputs[0].shape or ()) >= 2 and op.outputs[0].is_static:
            try:
                found.append(_Finder(op, constants, readers, outputs).find())
            except _NotAttentionError:
                continue
    return found


class _NotAttentionError(Exception):
    """A softmax is not that of an attention which this module knows."""


def _need(holds: object) -> None:
    if not holds:
        raise _NotAttentionError


class _Product(NamedTuple):
    """A matrix product: a name for each dim of its operands and its result."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    result: tuple[str, ...]

    @classmethod
    def of(cls, op: Op) -> _Product:
        _need(op.type in MATRIX_PRODUCTS and len(op.inputs) == 2)
        rank = len(op.outputs[0].shape)
        if op.type == "Einsum":
            equation = op.attrs["equation"]
            text = equation.decode() if isinstance(equation, bytes) else equation
            text = text.replace(" ", "")
            _need("." not in text)
            operands, result = text.split("->")
            left, right = operands.split(",")
            made = cls(tuple(left), tuple(right), tuple(result))
        else:
            flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
            batch = tuple(f"b{d}" for d in range(rank - 2))
            turned = [bool(op.attrs.get(flag)) for flag in flags]
            left_dims = ("k", "i") if turned[0] else ("i", "k")
            right_dims = ("j", "k") if turned[1] else ("k", "j")
            made = cls((*batch, *left_dims), (*batch, *right_dims), (*batch, "i", "j"))
        for names, tensor in zip(made, (*op.inputs, *op.outputs), strict=True):
            _need(len(names) == len(set(names)) == len(tensor.shape))
        return made


@dataclasses.dataclass(eq=False)
class _Finder:
    """Finder of the attention around one softmax."""

    softmax: Op
    constants: Constants
    readers: Mapping[Tensor, Sequence[Op]]
    outputs: set[Tensor]

    def __post_init__(self) -> None:
        (self.weights,) = self.softmax.outputs
        self.shape = tuple(self.weights.shape)
        self.rank = len(self.shape)
        self.row, self.column = self.rank - 2, self.rank - 1
        self.every: Dims = tuple(range(self.rank))
        self.names: dict[Tensor, Expression] = {}  # what trees do not look behind
        self.operands: list[Layout] = []

    def find(self) -> Attention:
        _need(min(self.shape[-2:]) > 1)
        (logits,) = self.softmax.inputs
        product, dims = self._product_before(logits)
        q, k = self._factors(product, dims)
        self.names[product.outputs[0]] = Variable(SCORES)
        scores = self._tree(logits, self.every)
        self.names = {self.weights: Variable(WEIGHTS)}
        gradient_core = self._gradient_core()
        forward = self._product_behind(gradient_core)
        result_op, position, weights_dims = forward
        v, result = self._weighted(result_op, position, weights_dims)
        weights = self._tree(result_op.inputs[position], weights_dims)
        _need(self._is_linear(weights, WEIGHTS))
        trees = Trees(scores, weights)
        gradient = None
        if gradient_core is not None:
            gradient, trees = self._gradient(gradient_core, trees, q, k, v, product)
        self._check_private(product, result_op, gradient)
        return Attention(self.softmax, q, k, v, result, trees, self.operands, gradient)

    # --- products ---------------------------------------------------------------------------

    def _product_before(self, tensor: Tensor) -> tuple[Op, Dims]:
        """The product that gives the scores which `tensor` is made of, in which dims."""
        seen: set[Tensor] = set()
        pending: list[tuple[Tensor, Dims]] = [(tensor, self.every)]
        while pending:
            tensor, dims = pending.pop()
            if tensor in seen or self.row not in dims or self.column not in dims:
                continue
            seen.add(tensor)
            if tensor.op.type in MATRIX_PRODUCTS:
                return tensor.op, dims
            pending += self._inputs(tensor.op, dims)
        raise _NotAttentionError

    def _factors(self, product: Op, dims: Dims) -> tuple[Layout, Layout]:
        """The operands of a product whose result is of the scores' dims: that with rows, and that
        with columns."""
        names = _Product.of(product)
        of = dict(zip(names.result, dims, strict=True))
        sides = []
        for tensor, own in zip(product.inputs, names[:2], strict=True):
            sides.append(self._settled(tensor, tuple(of.get(n, FEATURES) for n in own)))
        first, second = sides
        if self.column in first.dims:
            first, second = second, first
        _need(self._has(first, self.row) and self._has(second, self.column))
        return first, second

    def _has(self, side: Layout, own: int) -> bool:
        """Whether a tensor has all batch dims, features, and of rows and columns only `own`."""
        wanted = {*range(self.rank - 2), own, FEATURES}
        sized = [d for d, n in zip(side.dims, side.tensor.shape, strict=True) if d is not None]
        return set(sized) == wanted and len(sized) == len(wanted)

    def _weighted(self, product: Op, position: int, dims: Dims) -> tuple[Layout, Layout]:
        """The other operand and the result of a product that sums over columns.

        Args:
            position: of the operand in dims of the scores.
            dims: its dims.
        """
        names = _Product.of(product)
        own, other = names[position], names[1 - position]
        of = dict(zip(own, dims, strict=True))
        v = self._settled(product.inputs[1 - position], tuple(of.get(n, FEATURES) for n in other))
        result = Layout(product.outputs[0], tuple(of.get(n, FEATURES) for n in names.result))
        return v, result

    def _settled(self, tensor: Tensor, dims: tuple[int | None, ...]) -> Layout:
        """A tensor before it was transposed."""
        while tensor.op.type == "Transpose" or tensor.op.type in UNCHANGED:
            op = tensor.op
            if op.type == "Transpose":
                perm = self.constants.value(op.inputs[1])
                _need(perm is not None)
                before: list[int | None] = [None] * len(dims)
                for i, p in enumerate(perm):
                    before[int(p)] = dims[i]
                dims = tuple(before)
            tensor = op.inputs[0]
        return Layout(tensor, dims)

    def _product_behind(self, core: _Core | None) -> tuple[Op, int, Dims]:
        """The forward product that reads the weights: the op, which operand they are, and their
        dims."""
        own = set() if core is None else {core.scaled, core.gradient_op}
        found = [
            (op, position, dims)
            for op, position, dims in self._ends(self.weights, self.every, own)
            if not self._is_backward(op, position, dims)
        ]
        _need(len(found) == 1)
        return found[0]

    def _is_backward(self, op: Op, position: int, dims: Dims) -> bool:
        """Whether a product sums over rows: then it gives a gradient."""
        names = _Product.of(op)
        of = dict(zip(names[position], dims, strict=True))
        return self.row not in [of.get(n) for n in names.result]

    def _ends(self, tensor: Tensor, dims: Dims, leave: set[Op]) -> list[tuple[Op, int, Dims]]:
        """The products that read what `tensor` becomes, entry by entry: the op, the operand, and
        its dims."""
        found: list[tuple[Op, int, Dims]] = []
        pending, seen = [(tensor, dims)], {tensor}
        while pending:
            tensor, dims = pending.pop()
            _need(tensor not in self.outputs)
            for op in self.readers.get(tensor, ()):
                if op in leave:
                    continue
                for position, each in enumerate(op.inputs):
                    if each is not tensor:
                        continue
                    if op.type in MATRIX_PRODUCTS:
                        found.append((op, position, dims))
                        continue
                    made = self._forwards(op, position, dims)
                    _need(made is not None)
                    assert made is not None
                    if op.outputs[0] not in seen:
                        seen.add(op.outputs[0])
                        pending.append((op.outputs[0], made))
        return found

    def _forwards(self, op: Op, position: int, dims: Dims) -> Dims | None:
        """The dims of what `op` gives, if it works entry by entry on an operand of all dims."""
        (out, *others) = op.outputs
        if others or not out.is_static:
            return None
        if op.type == "Transpose":
            perm = self.constants.value(op.inputs[1])
            return None if perm is None else tuple(dims[int(p)] for p in perm)
        if op.type in VIEWS:
            return _reshaped(op.inputs[0].shape, dims, out.shape)
        if op.type in ELEMENTWISE and len(out.shape) == len(dims):
            return dims
        return None

    # --- the gradient -----------------------------------------------------------------------

    def _gradient_core(self) -> _Core | None:
        """The gradient of the softmax, if there is one."""
        for op in self.readers.get(self.weights, ()):
            if op.type != "Mul":
                continue
            for difference in op.inputs:
                less = difference.op
                if less.type != "Sub" or less.inputs[1].op.type != "Sum":
                    continue
                gradient, total = less.inputs
                (scaled, _) = total.op.inputs
                if scaled.op.type == "Mul" and {*scaled.op.inputs} == {gradient, self.weights}:
                    _need(total.shape == (*self.shape[:-1], 1))
                    return _Core(gradient, scaled.op, op)
        return None

    def _gradient(
        self, core: _Core, trees: Trees, q: Layout, k: Layout, v: Layout, product: Op
    ) -> tuple[GradientTensors, Trees]:
        scores = Variable(SCORES)
        source, dims = self._product_before(core.gradient)
        sides = self._factors(source, dims)
        result, values = sides
        _need(values == v)
        forward = {self.weights: Variable(WEIGHTS), product.outputs[0]: scores}
        self.names = {**forward, source.outputs[0]: Variable(GRADIENT)}
        weights_gradient = self._tree(core.gradient, self.every)
        made = core.gradient_op.outputs[0]
        of_q = of_k = None
        tree: Expression | None = None
        self.names = {**forward, made: Variable(GRADIENT)}
        for op, position, own in self._ends(made, self.every, set()):
            other, gave = self._weighted(op, position, own)
            each = self._tree(op.inputs[position], own)
            _need(tree is None or each == tree)
            tree = each
            if self._is_backward(op, position, own):
                _need(of_k is None and other == q)
                of_k = gave
            else:
                _need(of_q is None and other == k)
                of_q = gave
        of_v = None
        left = {core.scaled, core.gradient_op}
        self.names = {**forward}
        for op, position, own in self._ends(self.weights, self.every, left):
            if self._is_backward(op, position, own):
                other, gave = self._weighted(op, position, own)
                _need(of_v is None and other == result)
                _need(self._tree(op.inputs[position], own) == trees.weights)
                of_v = gave
        if of_q is None or of_k is None or of_v is None or tree is None:
            raise _NotAttentionError
        _need(self._is_linear(weights_gradient, GRADIENT) and self._is_linear(tree, GRADIENT))
        trees = trees._replace(weights_gradient=weights_gradient, scores_gradient=tree)
        return GradientTensors(result, of_q, of_k, of_v), trees

    def _is_linear(self, tree: Expression, name: str) -> bool:
        """Whether a tree is a multiple of the variable called so."""
        if isinstance(tree, Variable):
            return tree.name == name
        if isinstance(tree, Number):
            return float(tree.value) == 0.0
        if not isinstance(tree, Apply):
            return False
        if tree.type in ("Cast", "Neg", *UNCHANGED):
            return self._is_linear(tree.inputs[0], name)
        if tree.type == "SelectV2":
            return all(self._is_linear(each, name) for each in tree.inputs[1:])
        if tree.type in ("Mul", "RealDiv", "TanhGrad"):
            own = tree.inputs[-1] if tree.type == "TanhGrad" else tree.inputs[0]
            if tree.type == "Mul" and not _reads(own, name):
                own = tree.inputs[1]
            others = [each for each in tree.inputs if each is not own]
            return self._is_linear(own, name) and not any(_reads(o, name) for o in others)
        return False

    def _check_private(
        self, product: Op, result_op: Op, gradient: GradientTensors | None
    ) -> None:
        """Check that nothing else reads entries of the scores."""
        ends = {result_op}
        if gradient is not None:
            ends |= {layout.tensor.op for layout in gradient[1:]}
        pending, seen = [product.outputs[0]], {product.outputs[0]}
        while pending:
            tensor = pending.pop()
            _need(tensor not in self.outputs)
            for op in self.readers.get(tensor, ()):
                if op in ends:
                    continue
                for made in op.outputs:
                    _need(math.prod(made.shape) == math.prod(self.shape) or op.type == "Sum")
                    if made not in seen:
                        seen.add(made)
                        pending.append(made)

    # --- entry by entry ---------------------------------------------------------------------

    def _inputs(self, op: Op, dims: Dims) -> list[tuple[Tensor, Dims]]:
        """The operands of an op that gives a tensor of `dims`, each with its dims.

        Raises:
            _NotAttentionError: it does not work entry by entry.
        """
        _need(len(op.outputs) == 1)
        shape = op.outputs[0].shape
        if op.type == "Transpose":
            perm = self.constants.value(op.inputs[1])
            _need(perm is not None)
            before: list[int | None] = [None] * len(dims)
            for i, p in enumerate(perm):
                before[int(p)] = dims[i]
            return [(op.inputs[0], tuple(before))]
        if op.type == "BroadcastTo":
            return [(op.inputs[0], _aligned(dims, shape, op.inputs[0].shape))]
        if op.type == "StridedSlice" or op.type in VIEWS:
            (source, *_) = op.inputs
            _need(source.is_static and math.prod(source.shape) == math.prod(shape))
            made = _reshaped(shape, dims, source.shape)
            _need(made is not None)
            assert made is not None
            return [(source, made)]
        _need(op.type in ELEMENTWISE and op.type != "Fill")
        return [(t, _aligned(dims, shape, t.shape)) for t in op.inputs]

    def _tree(self, tensor: Tensor, dims: Dims) -> Expression:
        """What the entries of a tensor, of these dims, are made of."""
        if tensor in self.names:
            return self.names[tensor]
        op = tensor.op
        constant = self.constants.value(tensor)
        if constant is not None and (constant == constant.flat[0]).all():
            return Number(constant.flat[0].item(), tensor.dtype)
        known = self._positional(op, dims)
        if known is not None:
            return known
        if constant is not None:
            try:
                return self._made_of(tensor, dims)  # which says more of blocks
            except _NotAttentionError:
                return Table(_placed(constant, dims, self.rank), tensor.dtype)
        if not (self.row in dims and self.column in dims) and not self._reads_names(tensor):
            return self._operand(Layout(tensor, dims))
        return self._made_of(tensor, dims)

    def _made_of(self, tensor: Tensor, dims: Dims) -> Expression:
        """What the entries of a tensor are computed of."""
        op = tensor.op
        made = [self._tree(t, own) for t, own in self._inputs(op, dims)]
        if op.type not in ELEMENTWISE or op.type == "BroadcastTo":
            return made[0]
        attrs = tuple(sorted((k, v) for k, v in op.attrs.items() if not k.startswith("_")))
        return Apply(op.type, tuple(made), attrs, tensor.dtype)

    def _reads_names(self, tensor: Tensor) -> bool:
        """Whether a tensor, without rows or columns, is made of what is not an operand."""
        return tensor.dtype in ("resource", "variant") or not tensor.is_static

    def _operand(self, layout: Layout) -> Operand:
        if layout not in self.operands:
            self.operands.append(layout)
        return Operand(self.operands.index(layout), layout.tensor.dtype)

    def _positional(self, op: Op, dims: Dims) -> Expression | None:
        """What entries are that follow from where they are; None if they do not."""
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
            return self._along(dims[0], int(delta), int(start), made.dtype)
        if op.type == "Cumsum":
            axis, one = self.constants.value(op.inputs[1]), self._uniform(op.inputs[0])
            plain = not (op.attrs.get("exclusive") or op.attrs.get("reverse"))
            if axis is None or one is None or not plain:
                return None
            return self._along(dims[int(axis)], int(one), int(one), made.dtype)
        if op.type == "MatrixBandPart":
            ends = [self.constants.value(t) for t in op.inputs[1:]]
            one = self._uniform(op.inputs[0])
            _need(dims[-2:] == (self.row, self.column))
            if one is None or any(e is None for e in ends):
                return None
            inside: Expression = Number(True, "bool")
            for sign, end in zip((1, -1), ends, strict=True):
                assert end is not None
                if int(end) >= 0:
                    off = Position(sign, -sign, 0, "int32")
                    limit = Number(int(end), "int32")
                    one_side = Apply("LessEqual", (off, limit), _typed("int32"), "bool")
                    inside = Apply("LogicalAnd", (inside, one_side), (), "bool")
            if made.dtype == "bool":
                return inside if one else Number(False, "bool")
            pair = Number(one, made.dtype), Number(0, made.dtype)
            return Apply("SelectV2", (inside, *pair), _typed(made.dtype), made.dtype)
        return None

    def _along(self, dim: int | None, step: int, offset: int, dtype: str) -> Expression | None:
        if dim is None:
            return Number(offset, dtype)
        if dim not in (self.row, self.column):
            return None
        return Position(step * (dim == self.row), step * (dim == self.column), offset, dtype)

    def _uniform(self, tensor: Tensor) -> float | bool | None:
        """The number that all entries of a constant are; None if they differ or are not known."""
        if tensor.op.type == "Fill":
            tensor = tensor.op.inputs[1]
        value = self.constants.value(tensor)
        if value is None or not (value == value.flat[0]).all():
            return None
        found: float | bool = value.flat[0].item()
        return found


class _Core(NamedTuple):
    """The gradient of a softmax: `gradient * weights` summed over columns, taken off `gradient`, and
    the rest multiplied by the weights.

    Attributes:
        gradient: of the weights.
        scaled: the op that multiplies it by the weights.
        gradient_op: the op that gives the gradient of what the softmax read.
    """

    gradient: Tensor
    scaled: Op
    gradient_op: Op


def _typed(dtype: str) -> tuple[tuple[str, DType], ...]:
    """The attribute of an op of TensorFlow's that says of which dtype its operands are."""
    return (("T", DType(dtype)),)


def _reads(tree: Expression, name: str) -> bool:
    if isinstance(tree, Apply):
        return any(_reads(each, name) for each in tree.inputs)
    return isinstance(tree, Variable) and tree.name == name


def _aligned(dims: Dims, shape: Sequence[int], own: Sequence[int]) -> Dims:
    """The dims of an operand of shape `own` that is broadcast to a tensor of `dims` and `shape`."""
    behind = len(shape) - len(own)
    return tuple(
        None if n == 1 < made else d
        for d, made, n in zip(dims[behind:], shape[behind:], own, strict=True)
    )


def _reshaped(shape: Sequence[int], dims: Dims, other: Sequence[int]) -> Dims | None:
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
    return value.transpose(order).reshape(shape)
