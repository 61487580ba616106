"""Mesh, batch, schedule and stages of a plan, in words and as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tfpar.observability.report.data.schema import PipelineSummary, ScheduleTime, Stage
from tfpar.observability.report.tables import render_table
from tfpar.pipeline.generators import name_of
from tfpar.pipeline.recompute import recompute_text
from tfpar.plans.stages import meshes_text
from tfpar.spec.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from tfpar.plans import PipelinePlan, Plan


def schedule_text(stages: PipelinePlan) -> str:
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
    return f"{where}, {meshes_text(plan.meshes)}"


def batch_text(plan: Plan) -> str:
    """Over which axes the batch is split, and in which shares if they are unequal; on the mesh of
    each layout, where stages have several."""
    layouts = plan.by_layout
    if len(layouts) == 1:
        return _batch_text(plan)
    return "; ".join(f"{_batch_text(one)} on {one.mesh}" for one in layouts)


def _batch_text(plan: Plan) -> str:
    split = [n for n in plan.batch_axes if plan.mesh.shape[plan.mesh.axis(n)] > 1]
    if not split:
        return "batch not split"
    text = f"batch split over {' and '.join(split)}"
    for axis, shares in plan.shares.items():
        where = f" along {axis}" if len(split) > 1 else ""
        text += f" in shares {':'.join(map(str, shares))}{where}"
    return text


def statistics_text(microbatches: int) -> str:
    """Say that batch statistics are those of microbatches, not of the batch."""
    return (
        f"batch statistics of each of {microbatches} microbatches (not of the batch: another model)"
    )


def memory_limit(plan: Plan) -> float:
    """Return the memory limit of the rank whose memory `plan.cost` gives.

    In a pipeline it is a rank of the stage that uses most of its limit.
    """
    staged = None if plan.stages is None else plan.stages.cost
    known = None if staged is None else staged.stages[staged.fullest].limit_bytes
    if known is not None:
        return known
    return math.inf if plan.cluster is None else plan.cluster.device.memory_bytes


# --- tables of stages -----------------------------------------------------------------------

IDLE = 0.05
"""The part of a step below which ranks that work are as good as idle."""

MOST_STAGES = 8
"""That a summary shows which is not asked for all."""


def stages_tables(pipeline: PipelineSummary, full: bool) -> Iterator[str]:
    """Yield tables of the stages: their ranks, their layers and their costs.

    Without `full` only the first stages are shown, and their layers only where no cost is known.
    """
    stages = [*enumerate(pipeline.stages)]
    shown = stages if full else stages[:MOST_STAGES]
    priced = pipeline.bubble is not None
    if full or not priced:
        yield _where_table(pipeline, shown)
    if priced:
        yield _cost_table(pipeline, shown, "" if full else f" ({pipeline_text(pipeline)})")
    if len(shown) < len(stages):
        yield f"  and {len(stages) - len(shown)} more stages (full=True shows them)"


def pipeline_text(pipeline: PipelineSummary) -> str:
    """The order of its tasks, and what runs again."""
    if not pipeline.recompute:
        return pipeline.schedule
    some = recompute_text(pipeline.recompute)
    again = f"forward passes{some and f' of {some}'} run again in the backward pass"
    return f"{pipeline.schedule}, {again}"


def _where_table(pipeline: PipelineSummary, stages: Sequence[tuple[int, Stage]]) -> str:
    rows = [
        [
            str(number),
            ranks_text(stage.ranks),
            stage.layers,
            format_bytes(stage.num_bytes),
            "?" if stage.device_bytes is None else format_bytes(stage.device_bytes),
        ]
        for number, stage in stages
    ]
    columns = ("Stage", "Ranks", "Layers", "Variables", "Per device")
    return render_table(f"Stages ({pipeline_text(pipeline)})", columns, rows, numeric=(3, 4))


def _cost_table(pipeline: PipelineSummary, stages: Sequence[tuple[int, Stage]], order: str) -> str:
    limits = {stage.limit_bytes for stage in pipeline.stages}
    rows = [
        [
            str(number),
            ranks_text(stage.ranks),
            format_seconds(stage.forward_s or 0.0),
            format_seconds(stage.backward_s or 0.0),
            format_seconds(stage.update_s or 0.0),
            f"{100 * (stage.bubble or 0.0):.0f} %",
            format_bytes(stage.sent_bytes or 0.0),
            str(stage.in_flight),
            _memory_text(stage, show_limit=len(limits) > 1),
            stage.peak_task,
        ]
        for number, stage in stages
    ]
    columns = ("Stage", "Ranks", "F", "B", "U", "Bubble", "Sent", "In flight", "Memory", "At")
    title = (
        f"Stages{order}: forward pass F and backward pass B of a microbatch; update U; what a rank "
        f"waits beside its work, of all {100 * (pipeline.bubble or 0.0):.0f} %; bytes that a rank "
        f"sends to other stages in a step; microbatches at once; the most that a rank holds, and "
        f"the task then"
    )
    return render_table(title, columns, rows, numeric=range(2, 9))


def idle_ranks(stages: Sequence[Stage]) -> list[str]:
    """Say that some ranks have next to no work, if so: who asked for them wants to know."""
    found = sorted({rank for stage in stages if _is_idle(stage) for rank in stage.ranks})
    if not found:
        return []
    one = len(found) == 1
    return [
        f"{'Rank' if one else 'Ranks'} {ranks_text(found)} {'works' if one else 'work'} for less "
        f"than {100 * IDLE:g} % of a step: it would take about as long without "
        f"{'its device' if one else 'their devices'}."
    ]


def _is_idle(stage: Stage) -> bool:
    if stage.forward_s is None or stage.backward_s is None or stage.update_s is None:
        return False
    works = stage.forward_s + stage.backward_s + stage.update_s > 0
    return not (works and (stage.bubble or 0.0) < 1 / IDLE - 1)


def _memory_text(stage: Stage, show_limit: bool) -> str:
    """Format the peak memory of a rank and, where it differs between stages, its limit."""
    held = format_bytes(stage.peak_bytes or 0.0)
    if not show_limit or stage.limit_bytes is None:
        return held
    return f"{held} of {format_bytes(stage.limit_bytes)}"


def schedules_table(schedules: Sequence[ScheduleTime], in_shares: bool = False) -> str:
    """A line for each schedule that the plan's was picked from.

    Args:
        in_shares: the plan has unequal shares of the batch.
    """
    rows = [
        [
            found.name + ("" if found.fits else " (does not fit)"),
            format_seconds(found.seconds),
            format_bytes(found.memory_bytes),
        ]
        for found in schedules
    ]
    equal = "; with equal shares of the batch" if in_shares else ""
    title = (
        f"Schedules (the first is the plan's{equal}; seconds of a step; the most that a rank "
        f"holds; 'list' is an order made from what these stages take)"
    )
    return render_table(title, ("Schedule", "Step", "Memory"), rows, numeric=(1, 2))


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-3`, `4`; with gaps `0, 2`."""
    if len(ranks) > 1 and all(b == a + 1 for a, b in zip(ranks, ranks[1:], strict=False)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
