"""The best few plans of a step, for trials: what a search compared, and each as a plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator

from tfpar.planning import Request, Search
from tfpar.plans import Plan, Rival
from tfpar.search.meshes import logical_meshes
from tfpar.search.stages.choice import name_of_plan
from tfpar.spec import Mesh, PlanError, Replicate, Spec


def candidates(best: Plan, search: Search, request: Request, count: int) -> list[Plan]:
    """The best `count` plans by prediction, `best` first; all fit, and no two split alike.

    They are those of other numbers of stages and, where constraints leave the mesh open, the best
    of other logical meshes, which are searched one by one.

    Args:
        best: what `search` found for the request, or for it with another pipeline.
    """
    found = {_split_by(best): best}
    others = [rival.plan for rival in best.rivals if rival.plan is not None]
    if not request.constraints and request.base is None:
        others += _on_other_meshes([best, *others], search, request, count)
    for plan in sorted(others, key=_seconds):
        found.setdefault(_split_by(plan), plan)
    plans = [*found.values()][:count]
    return [dataclasses.replace(p, rivals=_rivals(p, plans, best), partitioned=None) for p in plans]


def _on_other_meshes(
    known: list[Plan], search: Search, request: Request, count: int
) -> Iterator[Plan]:
    """The best plan of each of the `count` meshes that are nearest to the best of all."""
    meshes = logical_meshes(request.mesh)
    whole = next((plan for plan in known if plan.stages is None), None)
    if whole is not None and whole.layouts:
        names = [name for name, _ in whole.layouts]
        meshes = [m for name in names for m in meshes if name in (str(m), str(m.mesh))]
    for logical in meshes[:count]:
        try:
            plan, _ = search(dataclasses.replace(request, meshes=(logical,)))
        except PlanError:
            continue  # none fits, or this mesh has none
        yield plan


def _rivals(plan: Plan, plans: list[Plan], best: Plan) -> tuple[Rival, ...]:
    """What `plan` is compared with: the other plans, and what `best` was that is none of these."""
    others = [Rival(name_of_plan(p), p.cost) for p in plans if p is not plan]
    names = {name_of_plan(p) for p in plans}
    return (*others, *(rival for rival in best.rivals if rival.name not in names))


def _seconds(plan: Plan) -> float:
    return math.inf if plan.cost is None else plan.cost.seconds


def _split_by(plan: Plan) -> Hashable:
    """What makes a plan run as it does, whatever its axes are called, and those of one rank."""
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
    laid = [(n, v.spec) for n, v in plan.variables.items() if v.spec is not None]
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
