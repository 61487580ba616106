"""Conversion between specs of tensors and splits of factors, axis by axis.

An op's strategy is one *split* per mesh axis: a factor with a pattern, or
`REPLICATE`, or `CARRY` (Partial passes through). Walking the axes left to right
with the sizes that the axes before left over turns splits into placements
and back; this is where strides and units of compound dimensions come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfpar.rules.rule import PLAIN, SAME, Dims, OpRule, Pattern
from tfpar.spec import Partial, Placement, Replicate, Shard, Spec

REPLICATE = -1
CARRY = -2

Split = tuple[int, Pattern]
"""(factor, REPLICATE or CARRY; pattern)."""
Splits = tuple[Split, ...]
WHOLE: Split = (REPLICATE, PLAIN)


def size_after(size: int, pattern: Pattern, parts: int) -> int:
    """Stored size of a factor of `size` once an axis of `parts` ranks splits it."""
    return Shard(0, *pattern).local_length(size, parts)


def fits(size: int, pattern: Pattern) -> bool:
    """Whether a factor of `size` can be cut in `pattern`."""
    stride, unit = pattern
    stride = size if stride is None else stride
    return stride > 0 and size % stride == 0 and stride % unit == 0


def has_factor(dims: Dims, factor: int) -> bool:
    return any(factor in dim for dim in dims)


def shard_of(dims: Dims, split: Split, sizes: Sequence[int], parts: int) -> Shard | None:
    """Return the placement that `split` gives a tensor of `dims` which has the factor.

    `sizes` are the factors' sizes as the axes before left them. None if the tensor lacks
    the factor, or has it in a compound dimension where the pattern does not show.
    """
    factor, pattern = split
    for d, dim in enumerate(dims):
        if factor not in dim:
            continue
        if len(dim) == 1:
            return Shard(d, *pattern)
        at = dim.index(factor)
        outer = math.prod(sizes[f] for f in dim[:at])
        inner = math.prod(sizes[f] for f in dim[at + 1 :])
        if pattern != PLAIN:
            stride, unit = pattern
            if at:
                return None
            return Shard(d, None if stride is None else stride * inner, unit * inner)
        stride = None if outer == 1 else sizes[factor] * inner
        return Shard(d, stride, 1 if sizes[factor] % parts == 0 else inner)
    return None


def split_of(dims: Dims, shard: Shard, sizes: Sequence[int], parts: int) -> Split | None:
    """Return the split that `shard` stands for, or None if it cuts across factors."""
    if shard.dim >= len(dims):
        return None
    dim = dims[shard.dim]
    if len(dim) == 1:
        return dim[0], (shard.stride, shard.unit)
    for factor in dim:
        if sizes[factor] > 1 and shard_of(dims, (factor, PLAIN), sizes, parts) is shard:
            return factor, PLAIN
    inner = math.prod(sizes[f] for f in dim[1:])
    stride = shard.stride
    if dim and sizes[dim[0]] > 1 and shard.unit % inner == 0 and (stride or 0) % inner == 0:
        pattern: Pattern = (None if stride is None else stride // inner, shard.unit // inner)
        if pattern != PLAIN and fits(sizes[dim[0]], pattern):
            return dim[0], pattern
    return None


def split_in_place(split: Split, before: Sequence[int], after: Sequence[int]) -> Split:
    """Return the split that leaves entries where `split` has them, in factors of other sizes; the
    same one if there is none.

    Earlier axes may split a factor of an input that they leave whole in the op, or the other way
    round: blocks of the one are strided in the other.

    Args:
        before, after: the sizes of factors as earlier axes leave them in the input, and in the op.
    """
    factor, (stride, unit) = split
    if factor < 0 or before[factor] == after[factor]:
        return split
    stride = before[factor] if stride is None else stride
    if stride == after[factor]:
        return factor, (None, unit)
    return (factor, (stride, unit)) if fits(after[factor], (stride, unit)) else split


def spec_of(
    dims: Dims, rule: OpRule, splits: Splits, mesh_shape: Sequence[int], is_output: bool = False
) -> Spec:
    """Return the spec of an operand of `dims` when the op runs with `splits`; CARRY gives R here.

    Where a split does not show in the operand, what later ones cut is as long as before.
    """
    sizes = list(rule.sizes)
    spec: list[Placement] = []
    for split, parts in zip(splits, mesh_shape, strict=True):
        placement: Placement = Replicate()
        factor, pattern = split
        if factor >= 0:
            shard = shard_of(dims, split, sizes, parts)
            if shard is not None:
                placement = shard
                sizes[factor] = size_after(sizes[factor], pattern, parts)
            elif is_output and rule.reduce.get(factor, SAME) != SAME:
                placement = Partial(rule.reduce[factor])
        spec.append(placement)
    return tuple(spec)


def splits_of(
    dims: Dims, spec: Spec, rule_sizes: Sequence[int], mesh_shape: Sequence[int]
) -> list[Split | None]:
    """Return the split that each axis makes in a tensor of `dims` with `spec`.

    WHOLE where the axis does not shard the tensor, None where its shard cuts
    across factors.
    """
    sizes = list(rule_sizes)
    out: list[Split | None] = []
    broken: set[int] = set()
    for placement, parts in zip(spec, mesh_shape, strict=True):
        if not isinstance(placement, Shard):
            out.append(WHOLE)
            continue
        split = None
        if placement.dim not in broken:
            split = split_of(dims, placement, sizes, parts)
        if split is None:
            broken.add(placement.dim)  # later strides of this dim are relative to it
        else:
            sizes[split[0]] = size_after(sizes[split[0]], split[1], parts)
        out.append(split)
    return out
