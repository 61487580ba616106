"""Equivalence of plans that run in the same way."""

from __future__ import annotations

import math
from collections.abc import Hashable

from tfpar.plans.plan import Plan
from tfpar.spec import Mesh, Replicate, Spec


def execution_key(plan: Plan) -> Hashable:
    """Return a key that is equal for plans that run in the same way, whatever their axes are
    called, axes of one rank left out."""
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
    laid = [(n, v.spec) for n, v in plan.variables.items() if v.spec is not None]
    laid += [(f"{n}/slots", v.slots) for n, v in plan.variables.items() if v.slots is not None]
    laid += [
        (f"{n}/gathered", v.gathered) for n, v in plan.variables.items() if v.gathered is not None
    ]
    laid += [
        (f"{name}:{slot}", spec)
        for name, op in plan.ops.items()
        for slot, spec in enumerate((*op.in_specs, *op.made, *op.kept))
    ]
    split = ((name, _parts(spec, plan.mesh)) for name, spec in laid)
    return (
        math.prod(sizes[axis] for axis in plan.batch_axes),
        tuple(sorted((name, parts) for name, parts in split if parts)),
        frozenset(n for n, v in plan.variables.items() if v.keep_gathered),
        frozenset(n for n, v in plan.variables.items() if v.scatters_gradient),
        plan.recompute,
        plan.attention,
        plan.offloaded,
        plan.microbatches,
        None if plan.stages is None else str(plan.stages.schedule),
        plan.stages is not None and plan.stages.recompute,
        () if plan.stages is None else plan.stages.layout_of,
        *(
            execution_key(plan.in_layout(layout))
            for layout in (() if plan.stages is None else plan.stages.layouts)
        ),
    )


def _parts(spec: Spec, mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """Return the placement of a tensor, with the axis size, along each axis on which several ranks
    differ."""
    return tuple(
        (str(placement), size)
        for placement, size in zip(spec, mesh.shape, strict=True)
        if size > 1 and not isinstance(placement, Replicate)
    )
