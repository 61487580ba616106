"""Emitting a reshard step along an axis whose ranks have unequal shares.

Collectives move blocks of equal size: those of the largest share. A smaller one is filled up with
entries of its own, which are dropped where they arrive.

The ranks of a mesh differ in shapes, so that each rank class has its program written; the ops of
these are the same one by one (`compile.local.uneven_program`). Hence nothing is left out here for a
rank that could do without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import Tensor
from tfpar.propagation.reshard import ReshardStep
from tfpar.spec import Shard, UnevenMesh, local_shape

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
