"""The mesh axes that constraints name, and those that split the batch."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.constraints.constraint_types import Constraint, SplitBatch
from tfpar.spec import Mesh, SpecError

BATCH_AXIS_NAMES = frozenset({"data", "batch"})
"""Mesh axes that hold the batch by convention, whatever else is laid over them (ZeRO, FSDP)."""


def batch_axes(constraints: Sequence[Constraint], mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that split the batch, in mesh order.

    Those that `batch(...)` says. Without it: axes called "data" or "batch", and every
    axis that no constraint names; so all of them if there are no constraints.

    Raises:
        SpecError: an unknown axis, or two different `batch(...)`.
    """
    check_axes(constraints, mesh)
    pinned = [c for c in constraints if isinstance(c, SplitBatch)]
    for other in pinned[1:]:
        if set(other.axes) != set(pinned[0].axes):
            raise SpecError(f"{pinned[0]} and {other} contradict each other. Keep one of them.")
    if pinned:
        return tuple(n for n in mesh.axis_names if n in pinned[0].axes)
    named = {axis for c in constraints for axis in c.named_axes}
    return tuple(n for n in mesh.axis_names if n in BATCH_AXIS_NAMES or n not in named)


def check_axes(constraints: Sequence[Constraint], mesh: Mesh) -> None:
    """Raise SpecError for a constraint that names an axis which `mesh` lacks."""
    for constraint in constraints:
        axes = constraint.axes if isinstance(constraint, SplitBatch) else constraint.named_axes
        for axis in axes:
            if axis not in mesh.axis_names:
                raise SpecError(
                    f"{constraint}: the mesh has no axis {axis!r}; its axes are {mesh}. "
                    f"Use one of {', '.join(map(repr, mesh.axis_names))}."
                )
