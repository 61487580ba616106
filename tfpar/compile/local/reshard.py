"""Emitting a reshard step: local slices, and collectives on contiguous dims.

Strides and padding are undone by reshapes around the collective, so that a backend
only ever sees contiguous, equal blocks along one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

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
    "Permute": "permute",
}
"""The types of collectives, with the kind that plans call each (`spec.names.GROUP_OPERATIONS`)."""

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
    if isinstance(mesh, UnevenMesh) and axis == mesh.uneven_axis and step.kind in STEPS:
        return emit_uneven_step(build, x, step, shape, mesh)
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


# --- unequal shares -------------------------------------------------------------------------
# Collectives move blocks of equal size: those of the largest share. A smaller one is filled up with
# entries of its own, which are dropped where they arrive.
#
# The ranks of a mesh differ in shapes, so that each rank class has its program written; the ops of
# these are the same one by one (`compile.local.uneven_program`). Hence nothing is left out here for
# a rank that could do without it.

STEPS = ("slice", "all_gather", "reduce_scatter", "all_to_all")
"""The kinds of steps in which shares matter."""


def emit_uneven_step(
    build: GraphBuilder, x: Tensor, step: ReshardStep, shape: tuple[int, ...], mesh: UnevenMesh
) -> Tensor:
    """Emit a step of `STEPS` along the uneven axis; arguments as of `reshard.emit_step`."""
    before, after = (local_shape(shape, spec, mesh) for spec in (step.before, step.after))
    old, new = step.before[mesh.uneven_axis], step.after[mesh.uneven_axis]
    axes = {"axes": step.axes}
    if step.kind == "all_to_all":
        assert isinstance(old, Shard) and isinstance(new, Shard)
        gone, made = _Cut(old, after[old.dim], mesh), _Cut(new, before[new.dim], mesh)
        x = build.take(x, _index(build, gone.filled), old.dim)
        x = build.take(x, _index(build, [made.parted]), new.dim)
        sent = list(x.shape)
        sent[new.dim], sent[old.dim] = made.width, gone.width * mesh.shape[mesh.uneven_axis]
        dims = {"split_dims": (new.dim,), "concat_dims": (old.dim,)}
        x = build.one("AllToAll", (x,), sent, x.dtype, axes | dims)
        x = build.take(x, _index(build, [gone.joined]), old.dim)
        return build.take(x, _index(build, made.real), new.dim)
    if step.kind == "all_gather":
        assert isinstance(old, Shard)
        cut = _Cut(old, after[old.dim], mesh)
        x = build.take(cut.opened(build, x), _index(build, cut.filled), cut.at)
        sent = list(x.shape)
        sent[cut.at] *= mesh.shape[mesh.uneven_axis]
        x = build.one("AllGather", (x,), sent, x.dtype, axes | {"dims": (cut.at,)})
        return build.reshape(build.take(x, _index(build, [cut.joined]), cut.at), after)
    assert isinstance(new, Shard)
    cut = _Cut(new, before[new.dim], mesh)
    x = cut.opened(build, x)
    if step.kind == "slice":
        begins = np.zeros((mesh.size, len(x.shape)), np.int32)
        begins[:, cut.at] = cut.starts
        sizes = [*x.shape[: cut.at], len(cut.real[mesh.rank]), *x.shape[cut.at + 1 :]]
        return build.reshape(build.slice(x, build.per_rank([*begins]), sizes), after)
    x = build.take(x, _index(build, [cut.parted]), cut.at)
    sent = list(x.shape)
    sent[cut.at] = cut.width
    attrs = axes | {"dims": (cut.at,), "reduction": step.reduction}
    x = build.one("ReduceScatter", (x,), sent, x.dtype, attrs)
    return build.reshape(build.take(x, _index(build, cut.real), cut.at), after)


class _Cut:
    """Cut of a dim along the uneven axis; a rank has `length` of it before.

    Attributes:
        at: the dim that is cut, once what is before it in a strided one is apart (`opened`).
        width: of a block that is sent.
        starts: for each rank, where its part begins.
        parted: of the whole dim, what makes it all blocks, one behind the other.
        joined: of all blocks, what makes them the whole dim.
        filled: for each rank, of its part what makes it a block; `real`: of a block, its part.
    """

    def __init__(self, shard: Shard, length: int, mesh: UnevenMesh) -> None:
        axis = mesh.uneven_axis
        self._outer, split, unit = shard.view(length)
        self._dim = shard.dim
        self.at = shard.dim + (self._outer > 1)
        blocks = [mesh.block(axis, split, at) for at in range(mesh.shape[axis])]
        starts = [start * unit for start, _ in blocks]
        counts = [count * unit for _, count in blocks]
        self.width = max(counts)
        inside = [np.minimum(np.arange(self.width), count - 1) for count in counts]
        parted = [start + one for start, one in zip(starts, inside, strict=True)]
        self.parted = np.concatenate(parted)
        self.joined = np.concatenate([i * self.width + np.arange(n) for i, n in enumerate(counts)])
        at = [mesh.coordinates(rank)[axis] for rank in range(mesh.size)]
        self.starts = [starts[i] for i in at]
        self.filled = [inside[i] for i in at]
        self.real = [np.arange(counts[i]) for i in at]

    def opened(self, build: GraphBuilder, x: Tensor) -> Tensor:
        """`x` with what lies before the part that is cut as a dim of its own."""
        shape = list(x.shape)
        if self._outer > 1:
            shape[self._dim : self.at] = [self._outer, shape[self._dim] // self._outer]
        return build.reshape(x, shape)


def _index(build: GraphBuilder, values: Sequence[np.ndarray]) -> Tensor:
    """A vector of positions, one for all ranks or one for each."""
    return build.per_rank([one.astype(np.int32) for one in values])
