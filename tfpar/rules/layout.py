"""Ops that give the same elements another shape: reshape, transpose, broadcast, tile, and kin."""

from __future__ import annotations

import math

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, ShapeAttr, Tensor
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule


def common_factors(
    left: tuple[int, ...], right: tuple[int, ...]
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Split two shapes of one size into shared factors.

    Returns, for each side, per dim the ids of its factors, major to minor; the
    third list holds the factor sizes. Empty tensors share no factors. Dims group into
    runs of equal product; within a run both sides cut it at their own boundaries, and the
    cuts that nest give the factors: (12, 5) and (3, 20) share 3, 4 and 5. A run whose cuts do
    not nest (6 and 4 of 12) is one unsplittable block but for the parts that agree.
    """
    sides: list[list[list[int]]] = [[[] for _ in left], [[] for _ in right]]
    sizes: list[int] = []
    if 0 in left or 0 in right:
        return sides[0], sides[1], sizes
    i = j = 0
    a = left[0] if left else 1
    b = right[0] if right else 1
    while i < len(left) and j < len(right):
        if a == 1 and left[i] == 1:
            i += 1
            a = left[i] if i < len(left) else 1
            continue
        if b == 1 and right[j] == 1:
            j += 1
            b = right[j] if j < len(right) else 1
            continue
        small = min(a, b)
        if max(a, b) % small:
            # The cuts do not nest: nothing in the rest of this run can be followed.
            block_a, block_b = a, b
            while block_a != block_b:
                if block_a < block_b:
                    i += 1
                    block_a *= left[i]
                else:
                    j += 1
                    block_b *= right[j]
            i, j = i + 1, j + 1
            a = left[i] if i < len(left) else 1
            b = right[j] if j < len(right) else 1
            continue
        if small > 1:
            factor = len(sizes)
            sizes.append(small)
            sides[0][i].append(factor)
            sides[1][j].append(factor)
        a, b = a // small, b // small
        if a == 1:
            i += 1
            a = left[i] if i < len(left) else 1
        if b == 1:
            j += 1
            b = right[j] if j < len(right) else 1
    return sides[0], sides[1], sizes


def reshape_notation(
    left: tuple[int, ...], right: tuple[int, ...]
) -> tuple[str, str, dict[str, int]]:
    """Notation for each side of a reshape, and the factor sizes."""
    a, b, sizes = common_factors(left, right)

    def side(dims: list[list[int]], shape: tuple[int, ...]) -> str:
        tokens = []
        for factors, size in zip(dims, shape, strict=True):
            product = 1
            for f in factors:
                product *= sizes[f]
            if product != size or not factors:
                tokens.append(".")  # part of a run that cannot be followed
            elif len(factors) == 1:
                tokens.append(f"f{factors[0]}")
            else:
                tokens.append("(" + " ".join(f"f{f}" for f in factors) + ")")
        return " ".join(tokens)

    return side(a, left), side(b, right), {f"f{f}": n for f, n in enumerate(sizes)}


@rule("Reshape")
def _reshape(op: Op, constants: Constants) -> OpRule | None:
    left, right, sizes = reshape_notation(op.inputs[0].shape, op.outputs[0].shape)
    return make_rule(op, f"{left}, . -> {right}", sizes=sizes, monotone=(0,), shape_operands={1: 0})


@rule("ExpandDims", "Squeeze")
def _expand_dims(op: Op, constants: Constants) -> OpRule | None:
    left, right, sizes = reshape_notation(op.inputs[0].shape, op.outputs[0].shape)
    lower = _lower_squeeze if op.type == "Squeeze" else None
    return make_rule(
        op, f"{left} -> {right}", sizes=sizes, monotone=(0,), lower=lower, any_pattern=True
    )


def _lower_squeeze(local: LocalOp) -> list[Tensor]:
    """A dim that is 1 only on the rank stays."""
    shape = local.op.inputs[0].shape
    dims = local.op.attrs.get("squeeze_dims") or [d for d, n in enumerate(shape) if n == 1]
    return local.copy(squeeze_dims=dims).outputs


@rule("Transpose", "ConjugateTranspose")
def _transpose(op: Op, constants: Constants) -> OpRule | None:
    perm = constants.value(op.inputs[1])
    if perm is None:
        return None
    names = [f"d{d}" for d in range(len(op.inputs[0].shape))]
    out = [names[int(p)] for p in perm]
    return make_rule(op, f"{' '.join(names)} -> {' '.join(out)}", monotone=(0,))


@rule("EnsureShape", "PlaceholderWithDefault")
def _ensure_shape(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "... -> ...", monotone=(0,), lower=_lower_shape_attr, any_pattern=True)


def _lower_shape_attr(local: LocalOp) -> list[Tensor]:
    return local.copy(shape=ShapeAttr(local.local_output_shape())).outputs


@rule("BroadcastTo")
def _broadcast_to(op: Op, constants: Constants) -> OpRule:
    return make_rule(op, "..., . -> ...", monotone=(0,), shape_operands={1: 0}, generates=True)


@rule("Tile")
def _tile(op: Op, constants: Constants) -> OpRule:
    """A tiled dim is its copies major, the input's entries minor."""
    left, right = [], []
    sizes: dict[str, int] = {}
    for d, (n, tiled) in enumerate(zip(op.inputs[0].shape, op.outputs[0].shape, strict=True)):
        copies = tiled // n if n else 0
        left.append(f"d{d}")
        right.append(f"d{d}" if copies == 1 else f"(r{d} d{d})" if copies and n > 1 else f"r{d}")
        sizes |= {f"r{d}": copies, f"d{d}": n}
    return make_rule(
        op,
        f"{' '.join(left)}, . -> {' '.join(right)}",
        sizes=sizes,
        monotone=(0,),
        lower=_lower_tile,
        any_pattern=True,
        generates=True,
    )


def _lower_tile(local: LocalOp) -> list[Tensor]:
    x, multiples = local.inputs
    copies = [
        tiled // max(n, 1) for n, tiled in zip(x.shape, local.local_output_shape(), strict=True)
    ]
    return local.copy([x, local.build.const(copies, multiples.dtype)]).outputs


@rule("SpaceToBatchND", "BatchToSpaceND")
def _space_to_batch(op: Op, constants: Constants) -> OpRule | None:
    """The batch grows by the block's positions, which are its major part."""
    block = constants.value(op.inputs[1])
    if block is None:
        return None
    flat, deep = op.inputs[0].shape, op.outputs[0].shape
    if op.type == "BatchToSpaceND":
        flat, deep = deep, flat
    spatial = ["."] * len(block)
    rest = [f"r{d}" for d in range(len(flat) - 1 - len(block))]
    small, large = ["b", *spatial, *rest], [f"(.{math.prod(map(int, block))} b)", *spatial, *rest]
    left, right = (small, large) if op.type == "SpaceToBatchND" else (large, small)
    return make_rule(
        op, f"{' '.join(left)} -> {' '.join(right)}", sizes={"b": flat[0]}, linear=((0,),)
    )
