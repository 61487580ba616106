"""Placement of the variables of a plan, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tfpar.ir.graph import itemsize
from tfpar.spec import Mesh, Replicate, Spec, local_shape
from tfpar.spec.quantities import format_bytes

if TYPE_CHECKING:
    from tfpar.observability.report.data.schema import VariableSummary
    from tfpar.plans import Plan, PlannedVariable, StageLayout
    from tfpar.propagation.partitioned_graph import PartitionedGraph


def placement_text(spec: Spec, mesh: Mesh) -> str:
    """`S(1) over model`, axis by axis; `replicated` where no axis does anything."""
    texts = [
        f"{placement} over {name}"
        for placement, name, size in zip(spec, mesh.axis_names, mesh.shape, strict=True)
        if not isinstance(placement, Replicate) and size > 1
    ]
    return ", ".join(texts) or "replicated"


def variable_specs(plan: Plan, partitioned: PartitionedGraph | None) -> dict[str, Spec | None]:
    """The spec of each variable, as propagation left it where that is known."""
    specs = {name: variable.spec for name, variable in plan.variables.items()}
    if partitioned is not None:
        specs.update({v.name: s for v, s in partitioned.variable_specs.items()})
    return specs


def variables_in_stages(
    plan: Plan, partitioned: PartitionedGraph | None
) -> dict[str, tuple[Spec | None, Mesh]]:
    """The spec of each variable in the layout of the stage that it is in, as propagation left it
    where that is known, with the mesh."""
    known = variable_specs(plan, partitioned)
    others = () if plan.stages is None else plan.stages.layouts
    specs = [known, *(variable_specs(plan.in_layout(one), one.partitioned) for one in others)]
    found = {}
    for name in plan.variables:
        layout, number = layout_of_variable(plan, name)
        found[name] = specs[number].get(name), layout.mesh
    return found


def layout_of_variable(plan: Plan, name: str) -> tuple[StageLayout, int]:
    """The layout of the stage that a variable is in, and its number."""
    stages = plan.stages
    owner = None if stages is None else stages.owners.get(name)
    if stages is None or owner is None or not stages.layout_of:
        return plan.layout, 0
    actor = stages.schedule.actors[owner]
    return plan.layout_of(actor), stages.layout_of[actor]


def variable_bytes(variable: PlannedVariable) -> int:
    return math.prod(variable.shape) * itemsize(variable.dtype)


def shard_bytes(variable: PlannedVariable, spec: Spec, mesh: Mesh) -> int:
    return math.prod(local_shape(variable.shape, spec, mesh)) * itemsize(variable.dtype)


def local_text(variables: Iterable[VariableSummary]) -> str:
    """Format the bytes that a rank stores of these variables; `?` where a spec is not known."""
    sizes = [variable.device_bytes for variable in variables]
    known = [size for size in sizes if size is not None]
    return format_bytes(sum(known)) if len(known) == len(sizes) else "?"
