"""Pipelines in other schedules, and with other stages on the actors of a plan: more of them on
each, or more even ones."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from tfpar.pipeline import AUTO, Pipeline
from tfpar.pipeline.recompute import RecomputeOf, dealt_recompute
from tfpar.plans import Plan
from tfpar.spec import ArgumentError

STAGES_OF_EACH = (2, 4)
"""Numbers of stages that each actor may have in place of one, where ranks wait long for others."""

EVEN = 0.02
"""Part of a step by which the busiest stage may be busier than the average before they are cut more
evenly: what stages send is least in cuts that are not even."""


def in_any_schedule(pipeline: Pipeline | None) -> Pipeline | None:
    """Return the pipeline in the schedule that is fastest of those that fit, if it has stages.

    Stages that do not fit in one schedule may in another, in which fewer microbatches are in
    flight.
    """
    if pipeline is None or pipeline.num_stages == 1:
        return pipeline
    return dataclasses.replace(pipeline, schedule=AUTO)


def has_picked_schedule(plan: Plan) -> bool:
    """Whether the schedule of a plan in stages is the fastest of those that were compared."""
    cost = None if plan.stages is None else plan.stages.cost
    return cost is not None and bool(cost.schedules)


def is_uneven(plan: Plan) -> bool:
    """Whether the busiest of a plan's stages is busier than the average by more than `EVEN` of a
    step."""
    cost = None if plan.stages is None else plan.stages.cost
    if cost is None:
        return False
    busy = [cost.seconds / (1 + stage.bubble) for stage in cost.stages]
    return max(busy) - sum(busy) / len(busy) > EVEN * cost.seconds


def interleaved(plan: Plan) -> Iterator[Pipeline]:
    """Yield the pipelines with several stages on each actor of `plan`."""
    one = _of_same_actors(plan)
    for each in STAGES_OF_EACH:
        again = dealt_recompute(one.recompute, one.num_actors, each)
        for name in ("interleaved", "zb-v"):
            with contextlib.suppress(ArgumentError):  # not for so many, or not recomputing
                yield dataclasses.replace(one, schedule=name, virtual_stages=each, recompute=again)


def evened(plan: Plan) -> Pipeline:
    """Return the pipeline whose stages, one on each actor of `plan`, are as even as they can be."""
    return dataclasses.replace(_of_same_actors(plan), tolerance=0.0)


def with_recompute(plan: Plan, recompute: RecomputeOf) -> Pipeline:
    """Return the pipeline with a stage on each actor of `plan`, of which these are recomputed."""
    return dataclasses.replace(_of_same_actors(plan), recompute=recompute)


def _of_same_actors(plan: Plan) -> Pipeline:
    """The pipeline with a stage on each actor of `plan`, and with its microbatches."""
    assert plan.stages is not None, "a plan with stages"
    ranks = plan.stages.groups(plan.mesh.size) if plan.stages.layouts else None
    actors, micro = plan.stages.num_actors, plan.microbatches
    return Pipeline(actors, micro, recompute=plan.stages.recompute, ranks=ranks)
