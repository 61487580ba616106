"""Attention in a graph: a softmax between two matrix products, and its gradient.

    %s = Einsum(%q, %k)                              %g = Einsum(%do, %v)
    ...                   scale, mask                ...
    %p = Softmax(%l)                                 %r = Mul(%g, %p)
    ...                   mask                       %d = Mul(Sub(%g, Sum(%r)), %p)
    %o = Einsum(%p', %v)                             ...
                                                     %dq = Einsum(%ds, %k), %dk, %dv

It is told by what ops do, not by the layer that they are of. All between the products has to work
entry by entry, on the scores, on what follows from positions, on what there is for each row or
column, and on masks that are fed. Random numbers for each entry (a dropout of weights) are none of
that, nor is a bias that is learned for each.

Tensors are written down in the dims of the scores: `(*batch, row, column)`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfpar.ir.attention import (
    GRADIENT,
    SCORES,
    WEIGHTS,
    Apply,
    EntryVariable,
    Expression,
    Number,
    Trees,
)
from tfpar.ir.constants import Constants
from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.passes.attention_entries import (
    GIVEN,
    Dims,
    EntryReader,
    Layout,
    NotAttentionError,
    need,
    reshaped,
)
from tfpar.ir.traits import ADDITIONS, ELEMENTWISE, MATRIX_PRODUCTS, UNCHANGED, VIEWS

FEATURES = -1
"""In place of a dim of the scores: what the products of q and k, or of v, sum or hand on."""


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
                found.append(
                    _Finder(
                        op, EntryReader(op.outputs[0].shape, constants), readers, outputs
                    ).find()
                )
            except NotAttentionError:
                continue
    return found


class _Product(NamedTuple):
    """A matrix product: a name for each dim of its operands and its result."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    result: tuple[str, ...]

    @classmethod
    def of(cls, op: Op) -> _Product:
        need(op.type in MATRIX_PRODUCTS and len(op.inputs) == 2)
        rank = len(op.outputs[0].shape)
        if op.type == "Einsum":
            equation = op.attrs["equation"]
            text = equation.decode() if isinstance(equation, bytes) else equation
            text = text.replace(" ", "")
            need("." not in text)
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
            need(len(names) == len(set(names)) == len(tensor.shape))
        return made


@dataclasses.dataclass(eq=False)
class _Finder:
    """Finder of the attention around one softmax."""

    softmax: Op
    entries: EntryReader
    readers: Mapping[Tensor, Sequence[Op]]
    outputs: set[Tensor]

    def __post_init__(self) -> None:
        (self.weights,) = self.softmax.outputs
        self.shape = tuple(self.weights.shape)
        self.rank = len(self.shape)
        self.row, self.column, self.every = (
            self.entries.row,
            self.entries.column,
            self.entries.every,
        )

    def find(self) -> Attention:
        need(min(self.shape[-2:]) > 1)
        (logits,) = self.softmax.inputs
        product, dims = self._product_before(logits)
        q, k = self._factors(product, dims)
        scores = self.entries.read(logits, self.every, {product.outputs[0]: EntryVariable(SCORES)})
        gradient_core = self._gradient_core()
        forward = self._product_behind(gradient_core)
        result_op, position, weights_dims = forward
        v, result = self._weighted(result_op, position, weights_dims)
        weights = self.entries.read(
            result_op.inputs[position], weights_dims, {self.weights: EntryVariable(WEIGHTS)}
        )
        _factors(weights, WEIGHTS)
        trees = Trees(scores, weights)
        gradient = None
        if gradient_core is not None:
            gradient, trees = self._gradient(gradient_core, trees, q, k, v, product)
        self._check_private(product, result_op, gradient)
        return Attention(self.softmax, q, k, v, result, trees, self.entries.operands, gradient)

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
            if tensor.op.type in GIVEN or self.entries.positional(tensor.op, dims) is not None:
                continue
            pending += self.entries.inputs(tensor.op, dims)
        raise NotAttentionError

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
        return self._checked(first, self.row), self._checked(second, self.column)

    def _checked(self, side: Layout, own: int) -> Layout:
        """Check that a tensor has all batch dims, none of them to be broadcast, one of features,
        and of rows and columns `own` alone."""
        need(Counter(side.dims) == Counter((*range(self.rank - 2), own, FEATURES)))
        for d, n in zip(side.dims, side.tensor.shape, strict=True):
            need(d is not None and (d == FEATURES or n == self.shape[d]))
        return side

    def _weighted(self, product: Op, position: int, dims: Dims) -> tuple[Layout, Layout]:
        """The other operand and the result of a product that sums over rows or columns.

        Args:
            position: of the operand in dims of the scores.
            dims: its dims.
        """
        names = _Product.of(product)
        own, other = names[position], names[1 - position]
        of = dict(zip(own, dims, strict=True))
        v = self._settled(product.inputs[1 - position], tuple(of.get(n, FEATURES) for n in other))
        result = Layout(product.outputs[0], tuple(of.get(n, FEATURES) for n in names.result))
        summed, left = self.column, self.row
        if self._is_backward(product, position, dims):
            summed, left = left, summed
        return self._checked(v, summed), self._checked(result, left)

    def _settled(self, tensor: Tensor, dims: tuple[int | None, ...]) -> Layout:
        """A tensor before it was transposed."""
        while tensor.op.type == "Transpose":
            before: list[int | None] = [None] * len(dims)
            for i, p in enumerate(self.entries.permutation(tensor.op)):
                before[p] = dims[i]
            tensor, dims = tensor.op.inputs[0], tuple(before)
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
        need(len(found) == 1)
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
            need(tensor not in self.outputs)
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
                    need(made is not None)
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
            return tuple(dims[p] for p in self.entries.permutation(op))
        if op.type in VIEWS:
            return reshaped(op.inputs[0].shape, dims, out.shape)
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
                    need(total.shape == (*self.shape[:-1], 1))
                    return _Core(gradient, scaled.op, op)
        return None

    def _gradient(
        self, core: _Core, trees: Trees, q: Layout, k: Layout, v: Layout, product: Op
    ) -> tuple[GradientTensors, Trees]:
        scores = EntryVariable(SCORES)
        source, dims = self._product_before(core.gradient)
        sides = self._factors(source, dims)
        result, values = sides
        need(values == v)
        forward = {self.weights: EntryVariable(WEIGHTS), product.outputs[0]: scores}
        names = {**forward, source.outputs[0]: EntryVariable(GRADIENT)}
        weights_gradient = self.entries.read(core.gradient, self.every, names)
        made = core.gradient_op.outputs[0]
        of_q = of_k = None
        tree: Expression | None = None
        names = {**forward, made: EntryVariable(GRADIENT)}
        for op, position, own in self._ends(made, self.every, set()):
            other, gave = self._weighted(op, position, own)
            each = self.entries.read(op.inputs[position], own, names)
            need(tree is None or each == tree)
            tree = each
            if self._is_backward(op, position, own):
                need(of_k is None and other == q)
                of_k = gave
            else:
                need(of_q is None and other == k)
                of_q = gave
        of_v = None
        left = {core.scaled, core.gradient_op}
        for op, position, own in self._ends(self.weights, self.every, left):
            if self._is_backward(op, position, own):
                other, gave = self._weighted(op, position, own)
                need(of_v is None and other == result)
                need(self.entries.read(op.inputs[position], own, forward) == trees.weights)
                of_v = gave
        if of_q is None or of_k is None or of_v is None or tree is None:
            raise NotAttentionError
        need(self._is_linear(tree, GRADIENT))
        # Only then is the sum over columns of weights and their gradients that over features of the
        # result and its gradient.
        need(_factors(weights_gradient, GRADIENT) == _factors(trees.weights, WEIGHTS))
        trees = trees._replace(weights_gradient=weights_gradient, scores_gradient=tree)
        return GradientTensors(result, of_q, of_k, of_v), trees

    def _is_linear(self, tree: Expression, name: str) -> bool:
        """Whether a tree is a multiple of the variable called so."""
        if isinstance(tree, EntryVariable):
            return tree.name == name
        if isinstance(tree, Number):
            return float(tree.value) == 0.0
        if not isinstance(tree, Apply):
            return False
        if tree.type in ("Cast", "Neg", *UNCHANGED):
            return self._is_linear(tree.inputs[0], name)
        if tree.type in ADDITIONS:
            return all(self._is_linear(each, name) for each in tree.inputs)
        if tree.type == "SelectV2":
            return all(self._is_linear(each, name) for each in tree.inputs[1:])
        if tree.type in ("Mul", "RealDiv", "TanhGrad"):
            own = tree.inputs[-1] if tree.type == "TanhGrad" else tree.inputs[0]
            if tree.type == "Mul" and not _reads(own, name):
                own = tree.inputs[1]
            others = [each for each in tree.inputs if each is not own]
            return self._is_linear(own, name) and not any(_reads(o, name) for o in others)
        return False

    def _check_private(self, product: Op, result_op: Op, gradient: GradientTensors | None) -> None:
        """Check that nothing else reads entries of the scores."""
        ends = {result_op}
        if gradient is not None:
            ends |= {layout.tensor.op for layout in gradient[1:]}
        pending, seen = [product.outputs[0]], {product.outputs[0]}
        while pending:
            tensor = pending.pop()
            need(tensor not in self.outputs)
            for op in self.readers.get(tensor, ()):
                if op in ends:
                    continue
                for made in op.outputs:
                    need(math.prod(made.shape) == math.prod(self.shape) or op.type == "Sum")
                    if made not in seen:
                        seen.add(made)
                        pending.append(made)


class _Core(NamedTuple):
    """The gradient of a softmax: `gradient * weights` summed over columns and taken off `gradient`;
    the rest is multiplied by the weights.

    Attributes:
        gradient: of the weights.
        scaled: the op that multiplies it by the weights.
        gradient_op: the op that gives the gradient of what the softmax read.
    """

    gradient: Tensor
    scaled: Op
    gradient_op: Op


def _factors(tree: Expression, name: str) -> Counter[tuple[str, Expression | None]]:
    """Count the factors by which a tree is a multiple of the variable called so, choices included.

    Raises:
        NotAttentionError: `tree` is no such multiple.
    """
    found: Counter[tuple[str, Expression | None]] = Counter()
    while isinstance(tree, Apply):
        inputs = tree.inputs
        if tree.type in ("Cast", *UNCHANGED):
            (tree,) = inputs
        elif tree.type == "SelectV2":
            condition, yes, no = inputs
            keeps = _reads(yes, name)
            other = no if keeps else yes
            need(isinstance(other, Number) and float(other.value) == 0.0)
            found[f"where {keeps}", condition] += 1
            tree = yes if keeps else no
        else:
            need(tree.type in ("Mul", "RealDiv"))
            at = 0 if tree.type == "RealDiv" or _reads(inputs[0], name) else 1
            need(not _reads(inputs[1 - at], name))
            found[tree.type, inputs[1 - at]] += 1
            tree = inputs[at]
    need(tree == EntryVariable(name))
    return found


def _reads(tree: Expression, name: str) -> bool:
    if isinstance(tree, Apply):
        return any(_reads(each, name) for each in tree.inputs)
    return isinstance(tree, EntryVariable) and tree.name == name
