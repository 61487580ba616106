"""Resharding: the sequence of collectives and local steps from one spec to another.

Pure: shapes, specs and mesh in, steps out. The cost model prices these steps and
the rewriter emits them, so the two cannot disagree.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from tfpar.ir.graph import Op, Tensor, itemsize
from tfpar.ir.roles import Roles, When
from tfpar.spec import (
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    SpecError,
    UnevenMesh,
    local_shape,
    replicated_spec,
)
from tfpar.spec.names import GROUP_OPERATIONS, PERMUTE
from tfpar.spec.nesting import without_outer


@dataclasses.dataclass(frozen=True)
class ReshardStep:
    """One step of a reshard.

    Attributes:
        kind: of `spec.names.GROUP_OPERATIONS`, or a local step: `slice` takes this rank's block,
            `keep_first` turns a replicated value into a partial one (zero but
            on the axis's first rank).
        axes: the mesh axes it runs over; their ranks are ordered major to minor.
        before, after: specs around the step.
        reduction: of all_reduce, reduce_scatter and keep_first.
    """

    kind: str
    axes: tuple[int, ...]
    before: Spec
    after: Spec
    reduction: str = "sum"

    @property
    def is_collective(self) -> bool:
        return self.kind in GROUP_OPERATIONS


@functools.lru_cache(maxsize=65536)
def lower_reshard(
    shape: tuple[int, ...], source: Spec, target: Spec, mesh: Mesh
) -> tuple[ReshardStep, ...]:
    """Return the steps from `source` to `target`.

    Free local slices come first (they shrink what follows), then reductions, then
    moves between dimensions (plain blocks only; strided ones are gathered and cut), then
    gathers; a dimension split by several axes is undone from its minor end, unless the minor axes
    keep their rows (`_outer_step`). All-reduces over several axes are one step.

    Raises:
        SpecError: the target is Partial where the source is sharded.
    """
    steps: list[ReshardStep] = []
    current = source
    while current != target:
        step = (
            _slice_step(current, target)
            or _outer_step(current, target, shape, mesh)
            or _reduce_step(current, target)
            or _all_to_all_step(current, target)
            or _gather_step(current, target)
            or _keep_first_step(current, target)
        )
        if step is None:
            raise SpecError(f"No way from {current} to {target} on {mesh}.")
        steps.append(step)
        current = step.after
    return tuple(steps)


def _replace(spec: Spec, axis: int, placement: Placement) -> Spec:
    return (*spec[:axis], placement, *spec[axis + 1 :])


def _stack(spec: Spec, dim: int) -> list[tuple[int, Shard]]:
    """(axis, shard) of the axes that split `dim`, major to minor."""
    return [(a, p) for a, p in enumerate(spec) if isinstance(p, Shard) and p.dim == dim]


def _may_push(current: Spec, target: Spec, axis: int) -> bool:
    """Whether splitting `target[axis].dim` along `axis` is next on that dim's stack."""
    placement = target[axis]
    if not isinstance(placement, Shard):
        return False
    have, want = _stack(current, placement.dim), _stack(target, placement.dim)
    return want[: len(have)] == have and len(want) > len(have) and want[len(have)][0] == axis


def _slice_step(current: Spec, target: Spec) -> ReshardStep | None:
    for axis, placement in enumerate(current):
        if isinstance(placement, Replicate) and _may_push(current, target, axis):
            return ReshardStep("slice", (axis,), current, _replace(current, axis, target[axis]))
    return None


def _reduce_step(current: Spec, target: Spec) -> ReshardStep | None:
    for axis, placement in enumerate(current):
        if not isinstance(placement, Partial) or target[axis] == placement:
            continue
        if _may_push(current, target, axis):
            after = _replace(current, axis, target[axis])
            return ReshardStep("reduce_scatter", (axis,), current, after, placement.op)
    for axis, placement in enumerate(current):
        if not isinstance(placement, Partial) or target[axis] == placement:
            continue
        # Not scatterable yet: gathers first may open the way, at the price of a
        # larger reduction, so reduce here.
        axes = tuple(
            a
            for a, p in enumerate(current)
            if p == placement and target[a] != p and not _may_push(current, target, a)
        )
        after = tuple(Replicate() if a in axes else p for a, p in enumerate(current))
        return ReshardStep("all_reduce", axes, current, after, placement.op)
    return None


def _is_innermost(spec: Spec, axis: int) -> bool:
    placement = spec[axis]
    return isinstance(placement, Shard) and _stack(spec, placement.dim)[-1][0] == axis


def _must_leave(current: Spec, target: Spec, axis: int) -> bool:
    """Whether `axis`'s shard has to be undone: it, or one it sits on, differs."""
    placement = current[axis]
    if not isinstance(placement, Shard):
        return False
    have, want = _stack(current, placement.dim), _stack(target, placement.dim)
    depth = next(i for i, (a, _) in enumerate(have) if a == axis)
    return have[: depth + 1] != want[: depth + 1]


def _is_plain(shard: Shard) -> bool:
    return shard.stride is None and shard.unit == 1


def _all_to_all_step(current: Spec, target: Spec) -> ReshardStep | None:
    for axis, (placement, wanted) in enumerate(zip(current, target, strict=True)):
        if (
            _must_leave(current, target, axis)
            and _is_innermost(current, axis)
            and isinstance(placement, Shard)
            and isinstance(wanted, Shard)
            and wanted.dim != placement.dim
            and _is_plain(placement)
            and _is_plain(wanted)
            and _may_push(current, target, axis)
        ):
            return ReshardStep("all_to_all", (axis,), current, _replace(current, axis, wanted))
    return None


def _gather_step(current: Spec, target: Spec) -> ReshardStep | None:
    for axis in reversed(range(len(current))):
        if _must_leave(current, target, axis) and _is_innermost(current, axis):
            return ReshardStep("all_gather", (axis,), current, _replace(current, axis, Replicate()))
    return None


def _outer_step(
    current: Spec, target: Spec, shape: tuple[int, ...], mesh: Mesh
) -> ReshardStep | None:
    """A step of one axis, in whose blocks others split the same dim and keep their rows.

    Eight rows over "data" and two microbatches, whose experts are over "data", too:

        rows of microbatch 0    S(0),S(0)      0 1 on rank 0, 4 5 on rank 1
        with all experts there  R,S(0/4)       0 1 4 5: two of each four

    So ranks exchange rows of one microbatch at a time. With R,S(0) it had 0 1 2 3, and none could
    be sent before all microbatches are there.
    """
    for axis, (placement, wanted) in enumerate(zip(current, target, strict=True)):
        kind = _KINDS.get((type(placement), type(wanted)))
        if kind is None or placement == wanted:
            continue
        before = _without(current, axis, shape, mesh)
        after = _without(target, axis, shape, mesh)
        dims = {p.dim for p in (placement, wanted) if isinstance(p, Shard)}
        have, want = _split_by(before, dims), _split_by(after, dims)
        if have and have == want:
            made = (
                t if a == axis or a in want else c
                for a, (c, t) in enumerate(zip(current, target, strict=True))
            )
            reduction = placement.op if isinstance(placement, Partial) else "sum"
            return ReshardStep(kind, (axis,), current, tuple(made), reduction)
    return None


_KINDS: Mapping[tuple[type[Placement], type[Placement]], str] = {
    (Shard, Shard): "all_to_all",
    (Shard, Replicate): "all_gather",
    (Replicate, Shard): "slice",
    (Partial, Shard): "reduce_scatter",
}
"""Step from one placement along an axis to another, of plain blocks."""


def _without(spec: Spec, axis: int, shape: tuple[int, ...], mesh: Mesh) -> Spec | None:
    """The spec with all along `axis`, where the axes behind it keep their rows; None if they have
    none of their own there, or blocks are not even."""
    gone = spec[axis]
    found = list(spec)
    found[axis] = Replicate()
    if not isinstance(gone, Shard):
        return tuple(found)
    if not _is_plain(gone) or isinstance(mesh, UnevenMesh):
        return None
    length, parts = shape[gone.dim], mesh.shape
    for other, shard in _stack(spec, gone.dim):
        if other == axis:
            continue
        kept: Shard | None = shard
        if other > axis:  # behind each of them, plain blocks are plain blocks
            kept = without_outer(shard, gone, length, parts[axis], parts[other])
        if kept is None or not kept.fits(length) or not kept.is_even(length, parts[other]):
            return None
        found[other] = kept
        length = kept.local_length(length, parts[other])
    return tuple(found)


def _split_by(spec: Spec | None, dims: Collection[int]) -> dict[int, Placement]:
    """The placements that split one of these dims, by axis; none of no spec."""
    return {a: p for a, p in enumerate(spec or ()) if isinstance(p, Shard) and p.dim in dims}


def _keep_first_step(current: Spec, target: Spec) -> ReshardStep | None:
    for axis, placement in enumerate(target):
        if isinstance(placement, Partial) and isinstance(current[axis], Replicate):
            after = _replace(current, axis, placement)
            return ReshardStep("keep_first", (axis,), current, after, placement.op)
    return None


def step_bytes(step: ReshardStep, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Payload of the step on one rank, in bytes: its larger side, padding included.

    For an all-reduce this is the size of the tensor reduced, for all-gather that of
    the result, for reduce-scatter and all-to-all that of the input.
    """
    if not step.is_collective:
        return 0
    if isinstance(mesh, UnevenMesh) and mesh.uneven_axis in step.axes:
        mesh = mesh.widest  # all send blocks of the largest share
    before = local_shape(shape, step.before, mesh)
    if step.kind in ("all_reduce", PERMUTE):
        return math.prod(before) * itemsize
    parts = mesh.group_size(step.axes)
    if step.kind == "all_gather":
        return math.prod(before) * parts * itemsize
    after = local_shape(shape, step.after, mesh)
    if step.kind == "reduce_scatter":
        return math.prod(after) * parts * itemsize
    (axis,) = step.axes
    placement = step.after[axis]
    assert isinstance(placement, Shard)
    dim = placement.dim
    sent = [*before[:dim], after[dim] * parts, *before[dim + 1 :]]
    return math.prod(sent) * itemsize


@functools.lru_cache(maxsize=65536)
def payloads(
    shape: tuple[int, ...], itemsize: int, source: Spec, target: Spec, mesh: Mesh
) -> tuple[tuple[ReshardStep, int], ...]:
    """Return the collectives from `source` to `target`, each with its `step_bytes`."""
    return tuple(
        (step, step_bytes(step, shape, itemsize, mesh))
        for step in lower_reshard(shape, source, target, mesh)
        if step.is_collective
    )


# --- collectives of a step ------------------------------------------------------------------
# `PartitionedGraph.communications()` lists those of a step. Whoever counts, prices or shows what a
# step moves walks that list, so that all see the same: what the rewriter emits.


class Communication(NamedTuple):
    """One collective of a step.

    Attributes:
        step: what it does, along which mesh axes.
        num_bytes: its payload on one rank, as in `reshard.step_bytes`.
        op: whose result it moves, or whose work it is part of. The roles of `op` say in which
            phase it runs, and how many of the model it stands for (`ir.roles`).
        tensor: what it moves, an output of `op`; None if it is part of the work of `op`.
        ahead: it is needed only when what `op` does at the same time is done.
    """

    step: ReshardStep
    num_bytes: int
    op: Op
    tensor: Tensor | None = None
    ahead: bool = False

    @property
    def kind(self) -> str:
        return self.step.kind

    @property
    def axes(self) -> tuple[int, ...]:
        return self.step.axes

    def when(self, roles: Roles) -> When:
        """Whether ops wait for it; if they do not, with which others it is packed."""
        return When.BETWEEN if self.tensor is None else roles.when(self.tensor)

    @classmethod
    def of_shared(cls, op: Op, mesh: Mesh) -> Communication:
        """Return the broadcast of what the first rank computes for all."""
        whole = replicated_spec(mesh.num_axes)
        step = ReshardStep("broadcast", tuple(range(mesh.num_axes)), whole, whole)
        return cls(step, sum(t.num_bytes for t in op.outputs), op)

    @classmethod
    def of_permutation(
        cls, op: Op, spec: Spec, axes: tuple[int, ...], ahead: bool, mesh: Mesh
    ) -> Communication:
        """Return the exchange of the parts of what `op` reads, in `spec`, along mesh axes.

        Args:
            ahead: see the attribute.
        """
        (tensor,) = op.inputs
        step = ReshardStep(PERMUTE, axes, spec, spec)
        num_bytes = step_bytes(step, tuple(tensor.shape), itemsize(tensor.dtype), mesh)
        return cls(step, num_bytes, op, ahead=ahead)
