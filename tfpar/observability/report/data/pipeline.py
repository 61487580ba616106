"""Pipeline of a plan: its stages, and the times of their tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfpar.cost.pipeline_cost import PipelineCost
from tfpar.observability.report.data.schema import (
    LayerSummary,
    PipelineSummary,
    ScheduleTime,
    Stage,
    TaskSummary,
    TransferSummary,
    VariableSummary,
)
from tfpar.observability.report.pipeline import schedule_text
from tfpar.pipeline.tasks import Task
from tfpar.plans import PipelinePlan, Plan


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
        recompute=stages.recompute,
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
