"""Lookups by index: gather and its kin.

The dim that is looked up in may be split as well (a vocabulary): each rank looks up
what it holds and gives zeros for the rest, and the results add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Op, Shape, Tensor, is_numeric
from tfpar.rules.local import LocalOp
from tfpar.rules.registry import rule
from tfpar.rules.rule import OpRule, make_rule


def lookup_reduction(dtype: str) -> str | None:
    """Return the reduction that combines results that are zero on all ranks but one; None if there
    is none."""
    if dtype == "bool":
        return "any"
    return "sum" if is_numeric(dtype) else None


def shifted_indices(
    local: LocalOp, indices: Tensor, factors: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Indices relative to this rank's part, and which of them fall inside it.

    Args:
        factors: the factor that each entry of the last dim of `indices` counts along; one that
            is not split is left as it is. A single factor applies to all indices.
    """
    dtype, build = indices.dtype, local.build
    starts: list[Any] = []
    lengths: list[Any] = []
    for factor in factors:
        held = local.indices(factor)
        starts.append(local.starts(factor))
        # Entries of a part precede its padding, on every level of nested splits.
        lengths.append([int((part >= 0).sum()) for part in held])
    if len(factors) == 1:
        starts, lengths = starts[0], lengths[0]
    else:
        starts, lengths = list(zip(*starts, strict=True)), list(zip(*lengths, strict=True))
    shifted = build.binary("Sub", indices, build.per_rank([np.array(s, dtype) for s in starts]))
    inside = build.binary(
        "LogicalAnd",
        build.binary("GreaterEqual", shifted, build.const(0, dtype)),
        build.binary("Less", shifted, build.per_rank([np.array(n, dtype) for n in lengths])),
    )
    if len(factors) > 1:
        inside = build.reduce("All", inside, [-1], keep_dims=True)
    return shifted, inside


def _look_up(
    local: LocalOp, factors: Sequence[str], inside_shape: Callable[[Shape], tuple[int, ...]]
) -> Sequence[Tensor]:
    """The op on this rank's part of input 0, zero where input 1 points elsewhere.

    `inside_shape(local indices shape)` is the shape that broadcasts against the result.
    """
    table, indices, *rest = local.inputs
    if not any(local.is_split(f) for f in factors):
        return local.copy([table, local.filled(1, 0), *rest]).outputs
    build = local.build
    indices, inside = shifted_indices(local, indices, factors)
    safe = build.select(inside, indices, build.const(0, indices.dtype))
    (found,) = local.copy([table, safe, *rest]).outputs
    inside = build.reshape(inside, inside_shape(indices.shape))
    return [build.select(inside, found, build.const(0, found.dtype))]


def _gather_rule(op: Op, axis: int, batch_dims: int) -> OpRule:
    params, indices = op.inputs[:2]
    shared = [f"b{d}" for d in range(batch_dims)]
    before = [*shared, *(f"p{d}" for d in range(batch_dims, axis))]
    after = [f"q{d}" for d in range(axis + 1, len(params.shape))]
    index = [f"i{d}" for d in range(batch_dims, len(indices.shape))]
    reduction = lookup_reduction(op.outputs[0].dtype)
    looked_up = "v" if reduction else "."

    def inside_shape(shape: Shape) -> tuple[int, ...]:
        return (
            *shape[:batch_dims],
            *[1] * (axis - batch_dims),
            *shape[batch_dims:],
            *[1] * len(after),
        )

    def lower(local: LocalOp) -> Sequence[Tensor]:
        return _look_up(local, ["v"] if reduction else [], inside_shape)

    def join(*parts: Sequence[str]) -> str:
        return " ".join(name for part in parts for name in part)

    movable = params.dtype != "resource"
    return make_rule(
        op,
        f"{join(before, [looked_up], after)}, {join(shared, index)}"
        f" -> {join(before, index, after)}",
        reduce={"v": reduction} if reduction else {},
        linear=((0,),) if movable else (),
        monotone=(0,) if movable else (),
        lower=lower,
        any_pattern={*before, *after, *index},
        masked=False,
    )


@rule("GatherV2")
def _gather_v2(op: Op, constants: Constants) -> OpRule | None:
    axis = constants.value(op.inputs[2])
    if axis is None:
        return None
    batch_dims = op.attrs.get("batch_dims", 0)
    if batch_dims < 0:
        batch_dims += len(op.inputs[1].shape)
    return _gather_rule(op, int(axis) % len(op.inputs[0].shape), batch_dims)


@rule("Gather")
def _gather(op: Op, constants: Constants) -> OpRule:
    return _gather_rule(op, 0, 0)


@rule("ResourceGather")
def _resource_gather(op: Op, constants: Constants) -> OpRule:
    batch_dims = op.attrs.get("batch_dims", 0)
    return _gather_rule(op, batch_dims, batch_dims)


@rule("GatherNd", "ResourceGatherNd")
def _gather_nd(op: Op, constants: Constants) -> OpRule:
    params, indices = op.inputs[:2]
    depth = indices.shape[-1]
    rest = [f"q{d}" for d in range(depth, len(params.shape))]
    index = [f"i{d}" for d in range(len(indices.shape) - 1)]
    reduction = lookup_reduction(op.outputs[0].dtype)
    looked_up = [f"v{d}" if reduction else "." for d in range(depth)]
    factors = [f"v{d}" for d in range(depth) if reduction]

    def lower(local: LocalOp) -> Sequence[Tensor]:
        return _look_up(local, factors, lambda shape: (*shape[:-1], *[1] * len(rest)))

    movable = params.dtype != "resource"
    return make_rule(
        op,
        f"{' '.join([*looked_up, *rest])}, {' '.join([*index, '.'])} -> "
        f"{' '.join([*index, *rest])}",
        reduce={name: reduction for name in factors if reduction},
        linear=((0,),) if movable else (),
        monotone=(0,) if movable else (),
        lower=lower,
        any_pattern={*rest, *index},
        masked=False,
    )
