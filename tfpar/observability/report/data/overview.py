"""Overview of a plan: its facts, its machines and its cost."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from tfpar.cost.cost import Cost as PricedCost
from tfpar.ir.roles import PHASES
from tfpar.observability.report.data.schema import (
    Axis,
    ByPhase,
    BytesByKind,
    CostSummary,
    Facts,
    LinkSummary,
    Machines,
    PartOfStep,
)
from tfpar.observability.report.pipeline import batch_text, memory_limit, mesh_text
from tfpar.observability.report.variables import placement_text
from tfpar.plans import Plan


def build_overview(plan: Plan) -> Facts:
    """Collect the facts of a plan."""
    model = plan.layers[0] if plan.layers else None
    return Facts(
        model="" if model is None else model.path,
        model_class="" if model is None else model.class_name,
        where=mesh_text(plan),
        batch=batch_text(plan),
        mesh=tuple(
            Axis(name, size, name in plan.batch_axes, plan.shares.get(name, ()))
            for name, size in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)
        ),
        ranks=plan.num_ranks,
        planner=plan.planner,
        microbatches=plan.microbatches,
        chunks=plan.chunks,
        batch_statistics=plan.batch_statistics,
        recompute=plan.recompute,
        offloaded_slots=len(plan.offloaded.slots),
        offloaded_activations=tuple(plan.offloaded.activations),
        split_slots=sum(variable.slots is not None for variable in plan.variables.values()),
        splits_anything=plan.splits_anything(),
        constraints=plan.constraints,
        fixed_tensors={n: placement_text(s, plan.mesh) for n, s in sorted(plan.tensors.items())},
        passed_over=plan.findings.passed_over,
        cut_short=plan.findings.cut_short,
        fingerprint=plan.fingerprint,
    )


def machines_of(plan: Plan) -> Machines | None:
    """The machines that the plan was priced for."""
    cluster = plan.cluster
    if cluster is None:
        return None
    devices = cluster.devices[: plan.num_ranks]
    limit, room = memory_limit(plan), cluster.host_share_bytes
    return Machines(
        name=cluster.name,
        shape=cluster.shape_text(),
        devices=dict(Counter(device.name for device in devices)),
        memory_limit=limit if math.isfinite(limit) else None,
        links=tuple(
            LinkSummary(level.name, level.bandwidth, level.latency_s)
            for level in (*reversed(cluster.nodes[0].levels), *reversed(cluster.levels))
        ),
        flops=sum(device.flops_of("float32") for device in devices),
        host_memory_limit=room if math.isfinite(room) else None,
    )


def cost_of(plan: Plan) -> CostSummary | None:
    """Return the cost of a step; None where it was not priced."""
    cost = plan.cost
    if cost is None:
        return None
    live = cost.memory_bytes - cost.weight_bytes - cost.state_bytes
    changed: dict[str, Any] = {
        "parts": parts_of(cost, 0.0 if plan.cluster is None else plan.cluster.step_s),
        "compute_s": ByPhase(**dict(zip(PHASES, cost.compute_s, strict=True))),
        "communication_s": ByPhase(**dict(zip(PHASES, cost.communication_s, strict=True))),
        "memory": BytesByKind(cost.weight_bytes, cost.state_bytes, live),
    }
    names = {field.name for field in dataclasses.fields(CostSummary)} - {*changed}
    return CostSummary(**changed, **{name: getattr(cost, name) for name in names})


def parts_of(cost: PricedCost, step_s: float) -> tuple[PartOfStep, ...]:
    """The parts of a step's time, which add up to it; those that take none are left out.

    Args:
        step_s: that a step takes besides; see `Cluster`.
    """
    found = {
        "compute": sum(cost.compute_s),
        "collectives": sum(cost.communication_s),
        "hidden": -cost.hidden_s,
        "gradients": cost.exposed_s,
        "transfers": cost.transfer_s,
        "bubble": cost.bubble_s,
        "start": step_s,
    }
    return tuple(PartOfStep(name, seconds) for name, seconds in found.items() if seconds)
