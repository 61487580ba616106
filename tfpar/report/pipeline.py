"""The stages of a plan and their schedule, as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tfpar.pipeline.generators import name_of
from tfpar.report.stages import ranks_text
from tfpar.report.tables import render_table
from tfpar.report.variables import local_text, variable_bytes
from tfpar.spec import Mesh, Spec
from tfpar.spec.quantities import format_bytes

if TYPE_CHECKING:
    from tfpar.plans import Plan, PlannedStages


def stage_table(plan: Plan, stages: PlannedStages, specs: Mapping[str, Spec | None]) -> str:
    """Where each stage runs, what lies there, and in which order tasks run."""
    rows = []
    for stage in range(stages.num_stages):
        names = [name for name, owner in stages.owners.items() if owner == stage]
        scopes = [name for name, where in stages.scopes.items() if where == stage]
        rows.append(
            [
                str(stage),
                ranks_of_stage(stages, stage, plan.mesh),
                _first_and_last(scopes),
                format_bytes(sum(variable_bytes(plan.variables[n]) for n in names)),
                local_text(plan, names, specs),
            ]
        )
    again = ", forward passes run again in the backward pass" if stages.recompute else ""
    title = f"Stages ({schedule_text(stages)}{again})"
    columns = ("Stage", "Ranks", "Layers", "Variables", "Per device")
    return render_table(title, columns, rows, numeric=(3, 4))


def schedule_text(stages: PlannedStages) -> str:
    """`schedule 1f1b`; a given one has no name, one made from durations is a `list`."""
    if stages.cost is not None and stages.cost.schedules:
        return f"schedule {stages.cost.schedules[0].name}, picked by simulation"
    name = name_of(stages.schedule)
    return "a given schedule" if name == "given" else f"schedule {name}"


def mesh_text(plan: Plan) -> str:
    """The mesh, for each stage or set of stages that there is."""
    if plan.stages is None:
        return str(plan.mesh)
    count, actors = plan.stages.num_stages, plan.stages.num_actors
    where = f"{count} stages" if count == actors else f"{count} stages on {actors} sets of ranks"
    return f"{where}, each {plan.mesh}"


def batch_text(plan: Plan) -> str:
    """Over which axes the batch is split, and in which shares if they are unequal."""
    split = [n for n in plan.batch_axes if plan.mesh.shape[plan.mesh.axis(n)] > 1]
    if not split:
        return "batch not split"
    text = f"batch split over {' and '.join(split)}"
    for axis, shares in plan.shares.items():
        where = f" along {axis}" if len(split) > 1 else ""
        text += f" in shares {':'.join(map(str, shares))}{where}"
    return text


def statistics_text(plan: Plan) -> str:
    """That batch statistics are not those of the batch."""
    return (
        f"batch statistics of each of {plan.microbatches} microbatches (not of the batch: another "
        f"model)"
    )


def memory_limit(plan: Plan) -> float:
    """What that rank may store whose memory `plan.cost` tells: of a pipeline, one of the stage that
    holds most of what it may."""
    staged = None if plan.stages is None else plan.stages.cost
    known = None if staged is None else staged.stages[staged.fullest].limit_bytes
    if known is not None:
        return known
    return math.inf if plan.cluster is None else plan.cluster.device.memory_bytes


def ranks_of_stage(stages: PlannedStages, stage: int, mesh: Mesh) -> str:
    """The ranks of the job that run a stage: `4-7`, `3`, or `0, 2`."""
    return ranks_text(stages.groups(mesh.size)[stages.schedule.actors[stage]])


def _first_and_last(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"
