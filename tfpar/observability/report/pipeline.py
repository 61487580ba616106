"""Mesh, batch, schedule and limits of a plan, in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tfpar.pipeline.generators import name_of

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
