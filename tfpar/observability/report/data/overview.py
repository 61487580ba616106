"""Overview of a plan: its facts, its machines, its cost and its pipeline."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tfpar.cost.cost import Cost as PricedCost
from tfpar.cost.pipeline_cost import PipelineCost
from tfpar.ir.roles import PHASES
from tfpar.observability.report.data.schema import (
    Axis,
    ByPhase,
    BytesByKind,
    CostSummary,
    Facts,
    LayerSummary,
    LinkSummary,
    Machines,
    PartOfStep,
    PipelineSummary,
    ScheduleTime,
    SecondsByCause,
    Stage,
    TaskSummary,
    TransferSummary,
    VariableSummary,
)
from tfpar.observability.report.pipeline import batch_text, memory_limit, mesh_text, schedule_text
from tfpar.observability.report.variables import placement_text
from tfpar.pipeline.tasks import Task
from tfpar.plans import PipelinePlan, Plan
from tfpar.plans.shares import has_unequal_shares


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
        gathered_weights=sum(v.gathered is not None for v in plan.variables.values()),
        splits_anything=plan.splits_anything(),
        constraints=plan.constraints,
        fixed_tensors={n: placement_text(s, plan.mesh) for n, s in sorted(plan.tensors.items())},
        passed_over=plan.findings.passed_over,
        cut_short=plan.findings.cut_short,
        fingerprint=plan.fingerprint,
        in_unequal_shares=has_unequal_shares(plan),
        attention=plan.attention,
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
        "host": cost.host_wait_s,
        "start": step_s,
    }
    return tuple(PartOfStep(name, seconds) for name, seconds in found.items() if seconds)


def causes_of(cost: PricedCost, step_s: float) -> SecondsByCause:
    """The seconds of a step by what they grow with.

    Args:
        step_s: as of `parts_of`.
    """
    *passes, _ = cost.compute_s
    *waited, update_s = cost.communication_s
    compute_s = sum(passes)
    links_s = sum(waited) - cost.hidden_s + cost.transfer_s
    once_links_s = cost.exposed_s + update_s
    rest_s = cost.seconds - step_s - compute_s - links_s - once_links_s
    return SecondsByCause(compute_s, links_s, rest_s, once_links_s, step_s)


# --- pipeline -------------------------------------------------------------------------------


def pipeline_of(
    plan: Plan, variables: Sequence[VariableSummary], layers: Sequence[LayerSummary]
) -> PipelineSummary | None:
    """The stages of a plan; None: there is one.

    Args:
        layers: none where they are not known.
    """
    stages = plan.stages
    if stages is None:
        return None
    groups, actors = stages.groups(plan.mesh.size), stages.schedule.actors
    cost = stages.cost
    return PipelineSummary(
        schedule=schedule_text(stages),
        actors=groups,
        actor_of_stage=tuple(actors[stage] for stage in range(stages.num_stages)),
        recompute=stages.recompute
        if isinstance(stages.recompute, bool)
        else tuple(stages.recompute),
        stages=tuple(
            _stage(stages, stage, groups[actors[stage]], variables, layers)
            for stage in range(stages.num_stages)
        ),
        bubble=None if cost is None else cost.bubble,
        schedules=()
        if cost is None
        else tuple(
            ScheduleTime(found.name, found.seconds, found.memory_bytes, not found.excess_bytes)
            for found in cost.schedules
        ),
        tasks=() if cost is None else _tasks(cost, actors),
        transfers=() if cost is None else tuple(map(_sent, cost.sends)),
    )


def _stage(
    stages: PipelinePlan,
    stage: int,
    ranks: tuple[int, ...],
    variables: Sequence[VariableSummary],
    layers: Sequence[LayerSummary],
) -> Stage:
    names = [layer.path for layer in layers if layer.stage == stage and layer.weights]
    if not layers:
        names = [name for name, where in stages.scopes.items() if where == stage]
    own = [variable for variable in variables if variable.stage == stage]
    sizes = [variable.device_bytes for variable in own]
    known = [size for size in sizes if size is not None]
    share: dict[str, Any] = {}
    if stages.cost is not None:
        found = stages.cost.stages[stage]
        share = {
            name: getattr(found, name)
            for name in (field.name for field in dataclasses.fields(Stage))
            if name not in ("ranks", "layers", "num_bytes", "device_bytes")
        }
    return Stage(
        ranks=ranks,
        layers=_first_and_last(names),
        num_bytes=sum(variable.num_bytes for variable in own),
        device_bytes=sum(known) if len(known) == len(sizes) else None,
        **share,
    )


def _tasks(cost: PipelineCost, actors: Sequence[int]) -> tuple[TaskSummary, ...]:
    found = []
    for start, end, text in cost.tasks:
        task = Task.parse(text)
        micro = None if task.kind == "U" else task.micro
        found.append(TaskSummary(start, end, actors[task.stage], task.stage, task.kind, micro))
    for start, end, stage in cost.reductions:
        found.append(TaskSummary(start, end, actors[stage], stage, "R", None))
    return tuple(sorted(found, key=lambda ran: (ran.start, ran.actor)))


def _sent(sent: tuple[float, float, str, int, float]) -> TransferSummary:
    start, end, text, target, num_bytes = sent
    task = Task.parse(text)
    micro = None if task.kind == "U" else task.micro
    return TransferSummary(start, end, task.stage, target, micro, num_bytes)


def _first_and_last(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"
