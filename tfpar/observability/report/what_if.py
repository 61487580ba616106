"""Estimates: the prediction for a plan, and those for several meshes and clusters side by side."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence

from tfpar.cost.op_compute import flops
from tfpar.observability.report.budget import Training, budget_json, number_text
from tfpar.observability.report.data.schema import WhatIf
from tfpar.observability.report.pipeline import batch_text, mesh_text, schedule_text
from tfpar.observability.report.pipeline import memory_limit as limit_of
from tfpar.observability.report.rentals import rent_lines, rentals_of
from tfpar.observability.report.tables import render_table
from tfpar.plans import Plan
from tfpar.spec import MemoryLimitError, Mesh, TfparError
from tfpar.spec.quantities import format_bytes, format_dollars, format_seconds

JSON_VERSION = 1
"""Of `estimates_json`: it is counted up where a key changes its meaning or goes."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Prediction for a model on one mesh of one cluster.

    Attributes:
        mesh: as it was asked for.
        cluster: its name.
        fits: whether a plan was found that fits into the memory of the devices.
        seconds: of a step; None without such a plan.
        samples_per_s: of the batch that was planned for; None without one, or where it has no size.
        dollars_per_million: of a million samples; None where the rent of a device is not known.
        memory_bytes: what the plan stores of a device, or what the smallest that was found would.
        memory_limit_bytes: what it may store there; None without a plan.
        plan: in words; empty without one.
        why: what stands in the way, in words; empty where it fits.
    """

    mesh: str
    cluster: str
    fits: bool
    seconds: float | None = None
    samples_per_s: float | None = None
    dollars_per_million: float | None = None
    memory_bytes: float | None = None
    memory_limit_bytes: float | None = None
    plan: str = ""
    why: str = ""

    @classmethod
    def of(cls, mesh: Mesh, cluster: str, plan: Plan, batch_size: int | None) -> Estimate:
        """Make the estimate of a plan that was searched, and so is priced and fits."""
        cost = plan.cost
        assert cost is not None, "a plan that was searched for"
        return cls(
            str(mesh),
            cluster,
            fits=True,
            seconds=cost.seconds,
            samples_per_s=batch_size and batch_size / cost.seconds,
            dollars_per_million=next((r.dollars_per_million for r in plan.findings.rentals), None),
            memory_bytes=cost.memory_bytes,
            memory_limit_bytes=limit_of(plan),
            plan=plan_in_words(plan),
        )

    @classmethod
    def too_large(cls, mesh: Mesh, cluster: str, error: MemoryLimitError) -> Estimate:
        """Make the estimate of a mesh on which no plan fits."""
        return cls(
            str(mesh), cluster, fits=False, memory_bytes=error.needed_bytes, why="does not fit"
        )

    @classmethod
    def impossible(cls, mesh: Mesh, cluster: str, error: TfparError) -> Estimate:
        """Make the estimate of a mesh which the cluster cannot have, or which has no plan."""
        return cls(str(mesh), cluster, fits=False, why=" ".join(str(error).split()))

    def rank(self, by_rent: bool = False) -> tuple[float, float]:
        """The fastest first, or what costs least; then what does not fit, the smallest first; then
        the impossible."""
        first = self.dollars_per_million if by_rent else self.seconds
        return (
            math.inf if first is None else first,
            math.inf if self.memory_bytes is None else self.memory_bytes,
        )


def plan_in_words(plan: Plan) -> str:
    """`data=2 x model=4, batch split over data, 4 microbatches, blocks computed again`."""
    said = [mesh_text(plan), batch_text(plan)]
    if plan.stages is not None:
        said.append(schedule_text(plan.stages))
    if plan.microbatches > 1:
        said.append(f"{plan.microbatches} microbatches")
    if plan.recompute or (plan.stages is not None and plan.stages.recompute):
        said.append("blocks computed again")
    if plan.offloaded:
        said.append("some in host memory")
    return ", ".join(said)


def estimates_table(
    found: Sequence[Estimate],
    top: int | None = None,
    first: str = "fastest",
    training: Training | None = None,
) -> str:
    """The first `top` (None: all) as a table, and what stands in the way of those not possible.

    Args:
        first: what comes first.
        training: of which columns say what it takes.
    """
    shown = found[:top]
    priced = any(one.dollars_per_million is not None for one in found)
    costs: list[tuple[str, Callable[[Estimate], str]]] = []
    if priced:
        costs.append(("a million", lambda one: _dollars(one.dollars_per_million)))
    if priced and training is not None:
        costs.append(("an epoch", lambda one: _dollars(training.epoch_dollars(one))))
    if training is not None:
        costs.append(("hours", lambda one: number_text(training.hours(one))))
    rows = [
        (
            one.mesh,
            one.cluster,
            "-" if one.seconds is None else format_seconds(one.seconds),
            "-" if one.samples_per_s is None else f"{one.samples_per_s:.4g}",
            *(text(one) for _, text in costs),
            "-" if one.memory_bytes is None else format_bytes(one.memory_bytes),
            "yes" if one.fits else "no",
            one.plan or _in_short(one.why),
        )
        for one in shown
    ]
    names = [name for name, _ in costs]
    columns = ("mesh", "cluster", "step", "samples/s", *names, "memory", "fits", "plan")
    numeric = range(2, len(columns) - 2)
    text = render_table(f"Estimates, the {first} first", columns, rows, numeric=numeric)
    left = len(found) - len(shown)
    return f"{text}\n{left} more {'is' if left == 1 else 'are'} not shown." if left else text


def _dollars(amount: float | None) -> str:
    return "-" if amount is None else format_dollars(amount)


def _in_short(why: str) -> str:
    """The first sentence of an error."""
    return why.partition(". ")[0].rstrip(".")


def estimates_json(
    found: Sequence[Estimate], top: int | None = None, training: Training | None = None
) -> str:
    """`{"version": 1, "estimates": [...]}`: the fields of each `Estimate`, the fastest first; with
    a training what it takes on each, and `"training"`."""
    described = [dataclasses.asdict(one) for one in found[:top]]
    if training is not None:
        for fleet, fields in zip(found, described, strict=False):
            fields["dollars_per_epoch"] = training.epoch_dollars(fleet)
            fields["training_hours"] = training.hours(fleet)
    for one in described:
        for key, value in one.items():
            if isinstance(value, float) and not math.isfinite(value):
                one[key] = None
    budget = {} if training is None else {"training": budget_json(found, training)}
    return json.dumps({"version": JSON_VERSION, "estimates": described, **budget}, indent=2)


def what_if(mesh: Mesh, found: Estimate) -> WhatIf:
    """The estimate of a mesh as a plan's report has it."""
    return WhatIf(
        found.cluster,
        found.mesh,
        mesh.size,
        found.seconds,
        found.memory_bytes,
        found.fits,
        found.plan or found.why,
    )


# --- one plan -------------------------------------------------------------------------------


def estimate(plan: Plan) -> str:
    """The predictions for a searched plan that holds its partitioned graph, as text."""
    cost, cluster, partitioned = plan.cost, plan.cluster, plan.partitioned
    assert cost is not None and cluster is not None and partitioned is not None
    graph, rules = partitioned.graph, partitioned.prepared.rules
    batch = next((t.shape[0] for t in graph.inputs if t.shape), 1)
    work = sum(flops(op, rules[op]) for op in graph.ops)
    limit = limit_of(plan)
    axes = " and ".join(plan.batch_axes) or "no axis"
    waiting = sum(cost.communication_s) + cost.exposed_s - cost.hidden_s
    rate = work / cost.seconds / plan.num_ranks
    return "\n".join(
        [
            f"Fits: {format_bytes(cost.memory_bytes)} of {format_bytes(limit)} a "
            f"device ({cost.memory_bytes / limit:.0%}), on {cluster.shape_text()} of "
            f"{cluster.name!r}",
            f"Plan: {mesh_text(plan)}, batch of {batch} over {axes}",
            f"Step: {format_seconds(cost.seconds)}, {waiting / cost.seconds:.0%} of it waiting for "
            f"other devices",
            f"Speed: {batch / cost.seconds:.4g} samples/s, {rate / 1e12:.3g} TFLOP/s a device",
            *rent_lines(rentals_of(plan.findings.rentals), full=False),
        ]
    )
