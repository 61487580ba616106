"""Storage under a spec: local shapes, and which rank holds which entries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfpar.spec.errors import SpecError
from tfpar.spec.mesh import Mesh
from tfpar.spec.placement import Placement, Replicate, Shard, Spec, format_spec


def local_shape(shape: Sequence[int], spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """Find the stored shape on every rank (of an `UnevenMesh`, on its `rank`), padding included."""
    sizes = list(shape)
    for axis, placement in enumerate(spec):
        if isinstance(placement, Shard):
            dim = placement.dim
            sizes[dim] = local_length(sizes[dim], placement, mesh, axis)
    return tuple(sizes)


def local_length(length: int, shard: Shard, mesh: Mesh, axis: int) -> int:
    """Find what is stored, as by `local_shape`, of a dim of local length `length` that `axis`
    splits."""
    outer, split, unit = shard.view(length)
    return outer * mesh.stored(axis, split) * unit


def drop_uneven_shards(shape: Sequence[int | None], spec: Spec, mesh: Mesh) -> Spec:
    """Drop from `spec` the shards that cannot cut what the axes before them leave of their dim.

    A stride is one of the local length: a shard that fits behind another one need not fit without
    it. Lengths that are not known are taken to fit. `spec` may be shorter than the mesh.
    """
    sizes = list(shape)
    found: list[Placement] = []
    for placement, parts in zip(spec, mesh.shape, strict=False):
        if isinstance(placement, Shard):
            length = sizes[placement.dim]
            if length is not None and not placement.fits(length):
                placement = Replicate()
            elif length is not None:
                sizes[placement.dim] = placement.local_length(length, parts)
        found.append(placement)
    return tuple(found)


def canonical(shape: Sequence[int | None], spec: Spec, mesh: Mesh) -> Spec:
    """Drop from `spec` the shards that divide nothing: along axes of one rank, of dims of length 1.

    Shards of dims that `shape` lacks stay: what takes the spec says that they are wrong.
    """
    sizes = list(shape)
    found: list[Placement] = []
    for placement, parts in zip(spec, mesh.shape, strict=True):
        kept: Placement = Replicate() if parts == 1 else placement
        if isinstance(kept, Shard) and kept.dim < len(sizes):
            length = sizes[kept.dim]
            if length == 1:
                kept = Replicate()
            elif length is not None:
                sizes[kept.dim] = kept.local_length(length, parts)
        found.append(kept)
    return tuple(found)


def fits(shape: Sequence[int | None], spec: Spec, mesh: Mesh) -> bool:
    """Whether a tensor of `shape` can lie as `spec`; see `drop_uneven_shards`."""
    return drop_uneven_shards(shape, spec, mesh) == spec


def unsplit_dims(shape: Sequence[int], spec: Spec) -> dict[int, int]:
    """Return the length of each dim that no axis splits."""
    split = {p.dim for p in spec if isinstance(p, Shard)}
    return {dim: length for dim, length in enumerate(shape) if dim not in split}


def sliced_spec(shape: Sequence[int], spec: Spec, mesh: Mesh, axes: tuple[int, ...]) -> Spec:
    """Return `spec` with one more dim split evenly over `axes`, along which it replicates: the
    first that no axis splits.

    Raises:
        SpecError: no such dim divides by the number of ranks along `axes`.
    """
    count = mesh.group_size(axes)
    for dim, length in unsplit_dims(shape, spec).items():
        if length % count == 0:
            return tuple(Shard(dim) if axis in axes else p for axis, p in enumerate(spec))
    raise SpecError(
        f"No dim of {list(shape)} is left to be cut in {count} slices beside {format_spec(spec)}."
    )


def dim_is_even(shape: Sequence[int], spec: Spec, mesh: Mesh, dim: int) -> bool:
    """Whether dimension `dim` is stored without padding on every rank."""
    length = shape[dim]
    for placement, parts in zip(spec, mesh.shape, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            if not placement.is_even(length, parts):
                return False
            length = placement.local_length(length, parts)
    return True


def local_indices(
    length: int, dim: int, spec: Spec, mesh: Mesh, coords: Sequence[int]
) -> np.ndarray:
    """Find the global index of each stored entry along `dim` at `coords`; -1 is padding."""
    index = np.arange(length)
    for axis, (placement, at) in enumerate(zip(spec, coords, strict=True)):
        if isinstance(placement, Shard) and placement.dim == dim:
            outer, split, unit = placement.view(len(index))
            start, block = mesh.block(axis, split, at)
            found = index.reshape(outer, split, unit)[:, start : start + block]
            padded = np.full((outer, block, unit), -1)
            padded[:, : found.shape[1]] = found
            index = padded.reshape(-1)
    return index


def take_local(value: np.ndarray, spec: Spec, mesh: Mesh, coords: Sequence[int]) -> np.ndarray:
    """Take the shard of `value` stored at `coords`; padding is zero. Partial axes are ignored."""
    for dim in sorted({p.dim for p in spec if isinstance(p, Shard)}):
        index = local_indices(value.shape[dim], dim, spec, mesh, coords)
        value = np.take(value, np.maximum(index, 0), axis=dim)
        if (index < 0).any():
            shape = [1] * value.ndim
            shape[dim] = -1
            value = np.where((index >= 0).reshape(shape), value, np.zeros((), value.dtype))
    return value


def assemble(
    shards: Sequence[np.ndarray], shape: Sequence[int], spec: Spec, mesh: Mesh
) -> np.ndarray:
    """Assemble the whole value from the shard of every rank (Partial axes are not reduced)."""
    first = np.asarray(shards[0])
    if not any(isinstance(p, Shard) for p in spec):
        return first
    whole = np.empty(tuple(shape), first.dtype)
    for rank, shard in enumerate(shards):
        coords = mesh.coordinates(rank)
        if any(c and not isinstance(p, Shard) for p, c in zip(spec, coords, strict=True)):
            continue
        at = [local_indices(n, d, spec, mesh, coords) for d, n in enumerate(shape)]
        keep = [np.flatnonzero(i >= 0) for i in at]
        whole[np.ix_(*(i[k] for i, k in zip(at, keep, strict=True)))] = np.asarray(shard)[
            np.ix_(*keep)
        ]
    return whole
