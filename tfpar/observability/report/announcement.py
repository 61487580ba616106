"""Announcement of a plan that comes into force, in one line."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tfpar.observability.report.data.diagnosis import why_slower
from tfpar.observability.report.pipeline import batch_text, mesh_text, statistics_text
from tfpar.observability.report.variables import variables_in_stages
from tfpar.spec import Mesh, Shard, Spec
from tfpar.spec.quantities import format_bytes, format_dollars, format_seconds

if TYPE_CHECKING:
    from tfpar.cost.cost import Cost
    from tfpar.plans import Plan
    from tfpar.propagation.partitioned_graph import PartitionedGraph


@dataclasses.dataclass(frozen=True)
class SearchSummary:
    """Summary of the search that found a plan.

    Attributes:
        seconds: that it took.
        one_device: what the step is predicted to cost there.
    """

    seconds: float
    one_device: Cost


def announcement(
    plan: Plan, partitioned: PartitionedGraph, search: SearchSummary | None = None
) -> str:
    """Mesh, planner, what is split, and what that is predicted to cost against one device.

    Args:
        search: None if the plan was not searched for now.
    """
    where = f"{mesh_text(plan)}, {_planner(plan, search)}"
    if plan.takes_own_statistics:
        where += f", {statistics_text(plan.microbatches)}"
    split = _what_is_split(plan, partitioned)
    alone = search.one_device if search is not None else None
    slower = _why_slower(plan, alone)
    if plan.mesh.size > 1 and not split:
        reason = f": one device would be {'faster' if slower else 'as fast'}"
        reason = reason if plan.cost is not None else ""
        return f"{where}: nothing is split{reason}{_prediction(plan, alone if slower else None)}"
    slower = f"; {slower}" if slower else ""
    return f"{where}: {', '.join(split) or 'one rank'}{_prediction(plan, alone)}{slower}"


def _why_slower(plan: Plan, alone: Cost | None) -> str:
    if plan.cost is None or alone is None or plan.cluster is None:
        return ""
    return why_slower(
        plan.cost.seconds,
        alone.seconds,
        ranks=plan.num_ranks,
        fits=alone.memory_bytes <= max(d.memory_bytes for d in plan.cluster.devices),
        is_constrained=bool(plan.constraints),
    )


def _planner(plan: Plan, search: SearchSummary | None) -> str:
    if not plan.planner:
        return "no planner"
    if search is None:
        return f"a plan of the {plan.planner} planner"
    cut_short = ", cut short" if plan.findings.cut_short else ""
    return f"{plan.planner} planner in {search.seconds:.1f} s{cut_short}"


def _what_is_split(plan: Plan, partitioned: PartitionedGraph) -> list[str]:
    mesh = plan.mesh

    def is_split(spec: Spec | None, mesh: Mesh = mesh) -> bool:
        return any(
            isinstance(p, Shard) and n > 1 for p, n in zip(spec or (), mesh.shape, strict=False)
        )

    found = []
    layouts = plan.by_layout
    if any(one.mesh.shape[one.mesh.axis(n)] > 1 for one in layouts for n in one.batch_axes):
        found.append(batch_text(plan))
    placed = variables_in_stages(plan, partitioned)
    weights = [n for n, v in plan.variables.items() if v.trainable]
    count = sum(is_split(*placed[n]) for n in weights)
    if count:
        found.append(f"{count} of {len(weights)} weights split")
    if not found:
        ops = sum(
            any(map(is_split, decision.strategy.out_specs))
            for decision in partitioned.decisions.values()
        )
        if ops:
            found.append(f"{ops} of {len(partitioned.decisions)} ops split one by one")
    return found


def _prediction(plan: Plan, alone: Cost | None = None) -> str:
    if plan.cost is None:
        return ""
    found = []
    for what, text, attribute in (
        ("a step", format_seconds, "seconds"),
        ("of memory a device", format_bytes, "memory_bytes"),
    ):
        found.append(f"{text(getattr(plan.cost, attribute))} {what}")
        if alone is not None:
            found[-1] += f" ({text(getattr(alone, attribute))} on one device)"
    if plan.cost.host_bytes:
        found.append(f"{format_bytes(plan.cost.host_bytes)} of its host's")
    for own in plan.findings.rentals[:1]:
        found.append(f"{format_dollars(own.dollars_per_million)} a million samples")
    return f"; predicted {', '.join(found)}"
