"""Unequal shares of the batch in the layouts of a plan."""

from __future__ import annotations

import dataclasses

from tfpar.plans.plan import Plan
from tfpar.spec import UnevenMesh, apportion


def has_unequal_shares(plan: Plan) -> bool:
    """Whether ranks have unequal shares of the batch in some layout of `plan`."""
    return any(one.shares for one in plan.by_layout)


def with_equal_shares(plan: Plan) -> Plan:
    """Return `plan` with equal shares of the batch in all of its layouts."""
    stages = plan.stages
    if stages is not None:
        layouts = tuple(dataclasses.replace(layout, shares={}) for layout in stages.layouts)
        stages = dataclasses.replace(stages, layouts=layouts)
    return dataclasses.replace(plan, shares={}, stages=stages)


def uneven_meshes(plan: Plan, batch_size: int | None) -> list[UnevenMesh]:
    """Return the mesh of `plan` with the shares that ranks have of a batch, as near to those of the
    plan as whole `shared_units` allow: the first is taken in which the step splits.

    There is none, and shares are equal, where the batch has no such units: it is padded as it is
    without shares.
    """
    found = []
    for name, weights in plan.shares.items():
        axis = plan.mesh.axis(name)
        for units in shared_units(plan, batch_size, axis):
            shares = apportion(units, weights)
            if len(set(shares)) > 1:
                found.append(UnevenMesh.over(plan.mesh, axis, shares))
    return found


def shared_units(plan: Plan, batch_size: int | None, axis: int) -> list[int]:
    """Return in how many equal parts a batch can be shared out along an axis, most first.

    Each part has a sample for each chunk or microbatch and for each coordinate of the other axes
    that split the batch; or, as some ops may split it further, of all other axes.
    """
    others = [a for a in range(plan.mesh.num_axes) if a != axis]
    given = [a for a in others if plan.mesh.axis_names[a] in plan.batch_axes]
    found = []
    for axes in (given, others):
        each = plan.mesh.group_size(tuple(axes)) * plan.chunks * plan.microbatches
        if batch_size and batch_size % each == 0:
            found.append(batch_size // each)
    return [n for n in dict.fromkeys(found) if n >= plan.mesh.shape[axis]]
