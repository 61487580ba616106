"""Checks of every plan where it is made: it fits its own mesh, and names only what it has. Whether
it fits a model is checked where it meets one (`Plan.fitted`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tfpar.cluster.description import Cluster
from tfpar.cluster.scaling import Correction
from tfpar.cost.cost import Cost
from tfpar.ir.step import ModelLayer
from tfpar.pipeline.statistics import BATCH_STATISTICS
from tfpar.plans.attention import ATTENTION_MODES
from tfpar.plans.difference import abbreviate_list
from tfpar.plans.findings import Candidate, Findings, Rental
from tfpar.plans.offload import OffloadPlan
from tfpar.plans.stages import PipelinePlan
from tfpar.plans.variables import PlannedVariable, SpecOption
from tfpar.propagation.partitioned_graph import OpPlan, PartitionedGraph
from tfpar.spec import (
    Mesh,
    Partial,
    PlanError,
    Shard,
    Spec,
    SpecError,
    UnevenMesh,
    arguments,
    format_spec,
    local_shape,
)

if TYPE_CHECKING:
    from tfpar.plans.plan import Plan


def check_plan(plan: Plan) -> None:
    """Check a plan by itself.

    Raises:
        PlanError: says what of it does not fit the rest.
        ArgumentError: a field of another type, or batch statistics that there are not.
    """
    _check_types(plan)
    for axis in plan.batch_axes:
        if axis not in plan.mesh.axis_names:
            raise PlanError(f"The plan splits the batch over {axis!r}; its mesh is {plan.mesh}.")
    if plan.shares:
        _check_shares(plan)
    if plan.chunks < 1:
        raise PlanError(f"A plan computes the batch in 1 chunk or more, not in {plan.chunks}.")
    if plan.microbatches < 1:
        raise PlanError(f"A plan has 1 microbatch or more, not {plan.microbatches}.")
    arguments.check_choice("batch_statistics", plan.batch_statistics, BATCH_STATISTICS)
    if plan.stages is not None:
        _check_stages(plan, plan.stages)
    _check_names(plan, plan.offloaded.slots, "offloads slots of variables")
    for name, variable in plan.variables.items():
        if math.prod(variable.shape) >= 2**60:
            raise PlanError(
                f"The plan's variable {name!r} of shape {arguments.shown(variable.shape)} is "
                f"larger than any that can be stored."
            )
        if variable.spec is not None:
            _check_spec(f"variable {name!r}", variable.spec, variable.shape, plan.mesh)
        if variable.slots is not None:
            _check_spec(f"slots of {name!r}", variable.slots, variable.shape, plan.mesh)
        if variable.gathered is not None:
            _check_spec(f"gathered {name!r}", variable.gathered, variable.shape, plan.mesh)
        for other in variable.alternatives:
            _check_alternative(f"variable {name!r}", other, variable.shape, plan.mesh)
    for name, spec in plan.tensors.items():
        _check_spec(f"tensor {name!r}", spec, None, plan.mesh)
    for name, op in plan.ops.items():
        for spec in (*op.in_specs, *op.made, *op.kept):
            _check_spec(f"an operand of {name!r}", spec, None, plan.mesh)


_LISTS: dict[str, type] = {
    **dict.fromkeys(("batch_axes", "constraints", "recompute"), str),
    "layers": ModelLayer,
}
_MAPPINGS = {"variables": PlannedVariable, "tensors": tuple, "ops": OpPlan, "shares": tuple}
_VALUES = {"mesh": Mesh, "offloaded": OffloadPlan, "fingerprint": str, "planner": str}
_VALUES_OR_NONE = {
    **{"cluster": Cluster, "stages": PipelinePlan, "report": Mapping},
    "partitioned": PartitionedGraph,
}


def _check_types(plan: Plan) -> None:
    for name, kind in _VALUES.items():
        arguments.instance(name, getattr(plan, name), kind)
    for name, kind in _VALUES_OR_NONE.items():
        if getattr(plan, name) is not None:
            arguments.instance(name, getattr(plan, name), kind)
    for name, kind in _LISTS.items():
        arguments.instances(name, getattr(plan, name), kind)
    for name, kind in _MAPPINGS.items():
        arguments.mapping(name, getattr(plan, name), kind)
    arguments.check_choice("attention", plan.attention, ATTENTION_MODES)
    arguments.integer("chunks", plan.chunks)
    arguments.integer("microbatches", plan.microbatches)
    arguments.text("tfpar_version", plan.tfpar_version)
    _check_findings(arguments.instance("findings", plan.findings, Findings))


def _check_findings(findings: Findings) -> None:
    if findings.cost is not None:
        arguments.instance("cost", findings.cost, Cost)
    for name in ("layouts", "baselines", "rivals", "trials", "attempts"):
        arguments.instances(name, getattr(findings, name), Candidate)
    if findings.correction is not None:
        arguments.instance("correction", findings.correction, Correction)
    arguments.instances("rentals", findings.rentals, Rental)
    arguments.flag("cut_short", findings.cut_short)
    if findings.bound_s is not None:
        arguments.finite("bound_s", findings.bound_s)
    if findings.passed_over is not None:
        passed_over = arguments.instances("passed_over", findings.passed_over, object)
        if len(passed_over) != 2:
            raise arguments.argument_error(
                "passed_over", findings.passed_over, "(seconds, collectives)"
            )
        arguments.finite("passed_over", passed_over[0], above=0.0)
        arguments.integer("passed_over", passed_over[1], 0)


def _check_shares(plan: Plan) -> None:
    names = ", ".join(map(repr, plan.shares))
    if len(plan.shares) > 1 or not set(plan.shares) <= set(plan.batch_axes):
        raise PlanError(
            f"The plan has shares of the batch along {names}; they are along one of the axes "
            f"that split the batch ({', '.join(map(repr, plan.batch_axes))})."
        )
    for name, shares in plan.shares.items():
        UnevenMesh.over(plan.mesh, plan.mesh.axis(name), shares)


def _check_stages(plan: Plan, stages: PipelinePlan) -> None:
    scheduled = stages.schedule.num_microbatches
    if plan.microbatches != scheduled:
        raise PlanError(
            f"The plan has {plan.microbatches} microbatches, but its schedule {scheduled}."
        )
    stages.check_ranks(plan.mesh.size)
    for layout in stages.layouts:
        check_plan(plan.in_layout(layout))
    if plan.chunks > 1:
        raise PlanError("A plan has chunks or stages, not both.")
    _check_names(plan, stages.owners, "puts variables into stages")


def _check_names(plan: Plan, names: Iterable[str], does: str) -> None:
    unknown = [name for name in names if name not in plan.variables]
    if unknown:
        raise PlanError(f"The plan {does} that it does not have: {abbreviate_list(unknown)}.")


def _check_spec(what: str, spec: Spec, shape: tuple[int, ...] | None, mesh: Mesh) -> None:
    if len(spec) != mesh.num_axes:
        raise PlanError(
            f"The plan lays {what} as {format_spec(spec)}; the mesh {mesh} needs "
            f"{mesh.num_axes} placements."
        )
    if shape is None:
        return
    if any(isinstance(p, Partial) for p in spec):
        raise PlanError(
            f"The plan lays {what} as {format_spec(spec)}: a variable is never Partial."
        )
    if any(isinstance(p, Shard) and p.dim >= len(shape) for p in spec):
        raise PlanError(f"The plan lays {what} as {format_spec(spec)}, but its shape is {shape}.")
    try:
        local_shape(shape, spec, mesh)
    except SpecError as error:
        raise PlanError(f"The plan lays {what} of shape {shape} on {mesh}: {error}") from None


def _check_alternative(what: str, other: SpecOption, shape: tuple[int, ...], mesh: Mesh) -> None:
    """Check an option of a variable, which may be on another mesh."""
    axes = len(other.axis_names) or mesh.num_axes
    split = {p.dim for p in other.spec if isinstance(p, Shard)}
    if len(other.spec) != axes or any(dim >= len(shape) for dim in split):
        raise PlanError(
            f"The plan's alternative {format_spec(other.spec)} for {what} of shape {shape} does "
            f"not fit {other.layout or mesh}."
        )
