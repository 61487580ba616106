"""Emitting a reshard step: local slices, and collectives on contiguous dims.

Strides and padding are undone by reshapes around the collective, so that a backend
only ever sees contiguous, equal blocks along one dimension.
"""

from __future__ import annotations

import math

import numpy as np

from tfpar.compile.local import uneven_reshard
from tfpar.ir.builder import GraphBuilder, neutral
from tfpar.ir.graph import DType, Tensor
from tfpar.propagation.reshard import ReshardStep
from tfpar.spec import Mesh, Shard, UnevenMesh, local_length, local_shape

COLLECTIVE_TYPES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllToAll": "all_to_all",
    "Broadcast": "broadcast",
}
"""The types of collectives, with the kind that plans call each (`spec.names.COLLECTIVES`)."""

DIMS = {
    "AllReduce": (),
    "AllGather": ("dims",),
    "ReduceScatter": ("dims",),
    "AllToAll": ("split_dims", "concat_dims"),
}
"""Of collectives with several operands (`packing`), the attributes with a dim for each."""

CHUNK = "chunk"
"""Attribute of a collective that goes once for each chunk of the batch: for which."""

ONCE = "_tfpar_once"
"""Attribute of a local op that only the first rank runs; a Broadcast hands on what it gives."""


def emit_step(
    build: GraphBuilder, x: Tensor, step: ReshardStep, shape: tuple[int, ...], mesh: Mesh
) -> Tensor:
    """Emit one step on the local tensor `x` of a tensor of global `shape`."""
    axis = step.axes[0]
    if (
        isinstance(mesh, UnevenMesh)
        and axis == mesh.uneven_axis
        and step.kind in uneven_reshard.STEPS
    ):
        return uneven_reshard.emit_uneven_step(build, x, step, shape, mesh)
    if step.kind == "all_reduce":
        return all_reduce(build, x, step.axes, step.reduction)
    if step.kind == "keep_first":
        return _keep_first(build, x, axis, step.reduction, mesh)
    if step.kind == "slice":
        shard = step.after[axis]
        assert isinstance(shard, Shard)
        return _slice_block(build, x, shard, axis, mesh)
    if step.kind == "reduce_scatter":
        shard = step.after[axis]
        assert isinstance(shard, Shard)
        cut, at = _cut_dim(build, x, shard, mesh.shape[axis], neutral(step.reduction, x.dtype))
        out_shape = list(cut.shape)
        out_shape[at] //= mesh.shape[axis]
        out = build.one(
            "ReduceScatter",
            (cut,),
            out_shape,
            x.dtype,
            {"axes": step.axes, "dims": (at,), "reduction": step.reduction},
        )
        return _merge(build, out, shard.dim, at)
    if step.kind == "all_gather":
        shard = step.before[axis]
        assert isinstance(shard, Shard)
        after = local_shape(shape, step.after, mesh)
        return _gather(build, x, shard, axis, mesh, after)
    if step.kind == "all_to_all":
        return _all_to_all(build, x, step, shape, mesh)
    raise AssertionError(step.kind)


def all_reduce(build: GraphBuilder, x: Tensor, axes: tuple[int, ...], reduction: str) -> Tensor:
    attrs = {"axes": axes, "reduction": reduction, "T": DType(x.dtype)}
    return build.one("AllReduce", (x,), x.shape, x.dtype, attrs)


def _cut_dim(
    build: GraphBuilder, x: Tensor, shard: Shard, parts: int, fill: object = 0
) -> tuple[Tensor, int]:
    """View `x` so that the blocks of `shard` lie along one dim, padded; (view, that dim)."""
    shape = list(x.shape)
    outer, split, unit = shard.view(shape[shard.dim])
    at = shard.dim
    if outer > 1:
        shape[at : at + 1] = [outer, split * unit]
        at += 1
    x = build.reshape(x, shape)
    after = [0] * len(shape)
    after[at] = (math.ceil(split / parts) * parts - split) * unit
    value = None if not fill else fill
    return build.pad(x, after, value), at


def _merge(build: GraphBuilder, x: Tensor, dim: int, at: int) -> Tensor:
    """Undo the (outer, rest) view of `_cut_dim`."""
    if at == dim:
        return x
    shape = list(x.shape)
    shape[dim : at + 1] = [shape[dim] * shape[at]]
    return build.reshape(x, shape)


def _slice_block(build: GraphBuilder, x: Tensor, shard: Shard, axis: int, mesh: Mesh) -> Tensor:
    view, at = _cut_dim(build, x, shard, mesh.shape[axis])
    size = list(view.shape)
    size[at] //= mesh.shape[axis]
    begins = []
    for rank in range(mesh.size):
        begin = np.zeros(len(size), np.int32)
        begin[at] = mesh.coordinates(rank)[axis] * size[at]
        begins.append(begin)
    return _merge(build, build.slice(view, build.per_rank(begins), size), shard.dim, at)


def _gather(
    build: GraphBuilder, x: Tensor, shard: Shard, axis: int, mesh: Mesh, after: tuple[int, ...]
) -> Tensor:
    parts = mesh.shape[axis]
    outer, split, unit = shard.view(after[shard.dim])
    shape, at = list(x.shape), shard.dim
    if outer > 1:
        shape[at : at + 1] = [outer, shape[at] // outer]
        at += 1
    x = build.reshape(x, shape)
    gathered = list(x.shape)
    gathered[at] *= parts
    out = build.one("AllGather", (x,), gathered, x.dtype, {"axes": (axis,), "dims": (at,)})
    if gathered[at] != split * unit:
        gathered[at] = split * unit
        out = build.slice(out, [0] * len(gathered), gathered)
    return build.reshape(out, after)


def _all_to_all(
    build: GraphBuilder, x: Tensor, step: ReshardStep, shape: tuple[int, ...], mesh: Mesh
) -> Tensor:
    """Blocks of the new dim are exchanged for blocks of the old one; both are plain."""
    axis = step.axes[0]
    old, new = step.before[axis], step.after[axis]
    assert isinstance(old, Shard) and isinstance(new, Shard)
    length = _length_without(step, shape, mesh, old.dim, axis)
    parts = mesh.shape[axis]
    cut, at = _cut_dim(build, x, new, parts)
    out_shape = list(cut.shape)
    out_shape[at] //= parts
    out_shape[old.dim] *= parts
    out = build.one(
        "AllToAll",
        (cut,),
        out_shape,
        x.dtype,
        {"axes": step.axes, "split_dims": (at,), "concat_dims": (old.dim,)},
    )
    if out_shape[old.dim] != length:
        out_shape[old.dim] = length
        out = build.slice(out, [0] * len(out_shape), out_shape)
    return out


def _length_without(
    step: ReshardStep, shape: tuple[int, ...], mesh: Mesh, dim: int, axis: int
) -> int:
    """Local length of `dim` once `axis`, innermost on it, no longer splits it."""
    length = shape[dim]
    for a, placement in enumerate(step.before):
        if a != axis and isinstance(placement, Shard) and placement.dim == dim:
            length = local_length(length, placement, mesh, a)
    return length


def _keep_first(build: GraphBuilder, x: Tensor, axis: int, reduction: str, mesh: Mesh) -> Tensor:
    flags = [np.asarray(mesh.coordinates(r)[axis] == 0) for r in range(mesh.size)]
    return build.select(build.per_rank(flags), x, build.const(neutral(reduction, x.dtype), x.dtype))
