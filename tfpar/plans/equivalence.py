"""Which plans run alike."""

from __future__ import annotations

import math
from collections.abc import Hashable

from tfpar.plans.plan import Plan
from tfpar.spec import Mesh, Replicate, Spec


def execution_key(plan: Plan) -> Hashable:
    """What makes a plan run as it does, whatever its axes are called, and those of one rank."""
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
    laid = [(n, v.spec) for n, v in plan.variables.items() if v.spec is not None]
    laid += [(f"{n}/slots", v.slots) for n, v in plan.variables.items() if v.slots is not None]
    laid += [
        (f"{name}:{slot}", spec)
        for name, op in plan.ops.items()
        for slot, spec in enumerate((*op.in_specs, *op.made, *op.kept))
    ]
    split = ((name, _parts(spec, plan.mesh)) for name, spec in laid)
    return (
        math.prod(sizes[axis] for axis in plan.batch_axes),
        tuple(sorted((name, parts) for name, parts in split if parts)),
        plan.recompute,
        plan.offloaded,
        plan.microbatches,
        None if plan.stages is None else str(plan.stages.schedule),
    )


def _parts(spec: Spec, mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """How a tensor lies along each axis of several ranks along which it is not the same on all."""
    return tuple(
        (str(placement), size)
        for placement, size in zip(spec, mesh.shape, strict=True)
        if size > 1 and not isinstance(placement, Replicate)
    )
