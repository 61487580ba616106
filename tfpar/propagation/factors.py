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
from tfpar.spec import Mesh, Partial, Placement, Replicate, Shard, Spec, UnevenMesh
from tfpar.spec.nesting import within_outer, without_outer

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


def split_in_place(
    split: Split,
    sizes: Sequence[int],
    before: Sequence[Split | None],
    after: Sequence[Split],
    mesh: Mesh,
) -> Split:
    """Return the split in an op that leaves entries of an input where its own `split` has them,
    behind other earlier axes; the same one if there is none.

    Earlier axes may split a factor of an input that they leave whole in the op, or the other way
    round: blocks of the one are strided in the other.

    Args:
        sizes: of the factors.
        before, after: the splits of the earlier axes in the input, and in the op; None cuts across
            factors.
    """
    factor, pattern = split
    known = [one for one in before if one is not None]
    if factor < 0 or len(known) < len(before):
        return split
    have, want = _splitting(factor, known, mesh), _splitting(factor, after, mesh)
    if have == want or isinstance(mesh, UnevenMesh):
        return split
    parts, axis = mesh.shape, len(before)
    found: Shard | None = Shard(0, *pattern)
    for outer, shard, length in reversed(_with_lengths(have, sizes[factor], mesh)):
        found = found and without_outer(found, shard, length, parts[outer], parts[axis])
    for outer, shard, length in _with_lengths(want, sizes[factor], mesh):
        found = found and within_outer(found, shard, length, parts[outer], parts[axis])
    return split if found is None else (factor, (found.stride, found.unit))


def _splitting(factor: int, splits: Sequence[Split], mesh: Mesh) -> list[tuple[int, Pattern]]:
    """(axis, pattern) of the axes that split a factor."""
    return [
        (axis, pattern)
        for axis, (split, pattern) in enumerate(splits)
        if split == factor and mesh.shape[axis] > 1
    ]


def _with_lengths(
    splits: Sequence[tuple[int, Pattern]], size: int, mesh: Mesh
) -> list[tuple[int, Shard, int]]:
    """(axis, shard, length before it) of the axes that split a factor of `size`."""
    found = []
    for axis, pattern in splits:
        found.append((axis, Shard(0, *pattern), size))
        size = size_after(size, pattern, mesh.shape[axis])
    return found


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
