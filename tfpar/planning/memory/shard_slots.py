"""Sharding of optimizer slots over the ranks on which their weights are replicated (ZeRO-1).

What a rank stores of an optimizer is divided by the number of ranks that would hold the same. Each
updates its part of a weight: gradients are scattered as they are summed, and what comes of them is
gathered, which moves as much as their sum alone does. So this is tried first where a plan does not
fit, before weights are split that each pass has to gather, or anything is computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from tfpar.cost.pricer import shard_bytes
from tfpar.ir.graph import itemsize
from tfpar.planning.pricing.price import price_whole
from tfpar.planning.problem import Problem
from tfpar.plans import Plan, PlannedVariable
from tfpar.propagation.prepared_graph import prepare
from tfpar.spec import Mesh, Replicate, Shard, Spec, SpecError, local_shape


def may_fit_with_sharded_slots(plan: Plan, problem: Problem) -> bool:
    """Whether sharded slots may be what makes a plan fit."""
    return 0 < problem.excess_in_parts(plan.cost) <= saved_by_sharded_slots(plan, problem)


def shard_slots(
    plan: Plan, problem: Problem, weights: Collection[str] | None = None
) -> Plan | None:
    """Return `plan` with the slots of its weights split in each of its layouts, not priced yet;
    None if none can be.

    Slots of matrices and larger weights are split: those of vectors are no more than what it takes
    to say so.

    Args:
        weights: whose slots; by default all.
    """
    if not _has_slots(problem):
        return None

    def split(variables: Mapping[str, PlannedVariable], mesh: Mesh) -> dict[str, PlannedVariable]:
        found = {
            name: dataclasses.replace(variable, slots=spec)
            for name, variable, spec in _splits(variables, mesh)
            if weights is None or name in weights
        }
        return {**variables, **found}

    found = dataclasses.replace(plan, variables=split(plan.variables, plan.mesh))
    if plan.stages is not None:
        layouts = tuple(
            dataclasses.replace(one, variables=split(one.variables, one.mesh))
            for one in plan.stages.layouts
        )
        found = dataclasses.replace(found, stages=dataclasses.replace(plan.stages, layouts=layouts))
    return None if found == plan else found


def with_sharded_slots(plan: Plan, problem: Problem) -> Plan | None:
    """Return `plan`, which has a cost, with the slots of its weights split, as the whole of it
    costs then; None if none can be."""
    found = None if plan.cost is None else shard_slots(plan, problem)
    if found is None:
        return None
    cost, laid = price_whole(found, problem)
    return found.with_findings(cost=cost).with_partitioned(laid)


def saved_by_sharded_slots(plan: Plan, problem: Problem) -> float:
    """Return the bytes, at most, that `with_sharded_slots` saves of the optimizer state of a
    rank."""
    if not _has_slots(problem):
        return 0.0
    if problem.step.state_ratio is None:  # which of its variables they are is not known
        return 0.0 if plan.cost is None else plan.cost.state_bytes
    saved = 0.0
    for _, variable, slots in _splits(plan.variables, plan.mesh):
        assert variable.spec is not None, "what is split further is known"
        shape, item = variable.shape, itemsize(variable.dtype)
        before, after = (
            shard_bytes(shape, item, spec, plan.mesh) for spec in (variable.spec, slots)
        )
        saved += problem.step.state_ratio * (before - after)
    return saved


def _splits(
    variables: Mapping[str, PlannedVariable], mesh: Mesh
) -> Iterator[tuple[str, PlannedVariable, Spec]]:
    for name, variable in variables.items():
        spec = _split(variable, mesh)
        if spec is not None:
            yield name, variable, spec


def _has_slots(problem: Problem) -> bool:
    """Whether there are any that ranks would store each for itself."""
    if problem.cluster.one_memory:
        return False
    if problem.step.state_ratio is not None:
        return problem.step.state_ratio > 0
    return bool(prepare(problem.step.graph).followed)


def _split(variable: PlannedVariable, mesh: Mesh) -> Spec | None:
    """The slots of a weight along each axis that can divide them evenly; None if none can."""
    if not variable.trainable or variable.spec is None or len(variable.shape) < 2:
        return None
    spec = variable.spec
    for axis, size in enumerate(mesh.shape):
        if isinstance(spec[axis], Replicate) and size > 1:
            spec = next(
                (s for s in _along(spec, axis, variable) if _is_even(s, variable, mesh)), spec
            )
    return spec if spec != variable.spec else None


def _along(spec: Spec, axis: int, variable: PlannedVariable) -> list[Spec]:
    return [(*spec[:axis], Shard(d), *spec[axis + 1 :]) for d in range(len(variable.shape))]


def _is_even(spec: Spec, variable: PlannedVariable, mesh: Mesh) -> bool:
    """Whether all ranks have as much of it, and none has padding."""
    parts = [n for n, p in zip(mesh.shape, spec, strict=True) if isinstance(p, Shard)]
    try:
        local = local_shape(variable.shape, spec, mesh)
    except SpecError:
        return False
    size, whole = 1, 1
    for length, full in zip(local, variable.shape, strict=True):
        size, whole = size * length, whole * full
    for count in parts:
        size *= count
    return size == whole
