"""Stages that are recomputed where they have to be, and no others.

A pipeline that recomputes all stages is tried where nothing else is expected to fit. Often part of
them would fit as they are: those of larger devices, or those that have few microbatches in flight.
These save a forward pass, and take units from the others, until all take equally long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tfpar.pipeline import Pipeline
from tfpar.pipeline.recompute import RecomputeOf
from tfpar.planning.inter_op.other_stages import with_recompute
from tfpar.planning.memory.fit import seconds_or_zero
from tfpar.planning.memory.stages import StagedFit, StageStep
from tfpar.plans import Plan


def recompute_fewer(plan: Plan, step_of: Callable[[Pipeline], StageStep]) -> Plan | None:
    """Return the fastest plan in 1F1B that fits with the layout of `plan`, whose stages are
    recomputed, and fewer of them; None if there is none.

    Units are shared out as if no stage were recomputed, memory says which have to be, and units are
    shared out again by what each stage then computes.

    Args:
        plan: with a stage on each actor.
        step_of: the step in a pipeline.

    Raises:
        PlanError, ScheduleError: as of the step.
    """
    assert plan.stages is not None, "a plan with stages"
    layout = dataclasses.replace(plan, shares={}, stages=None)
    recompute = plan.stages.recompute
    asked: list[RecomputeOf] = [False if recompute is True else recompute]
    found: list[Plan] = []
    for each in asked:
        settled = StagedFit(step_of(with_recompute(plan, each))).settle(layout)
        if settled is not None:
            assert settled.stages is not None, "a plan with stages"
            found.append(settled)
            if len(asked) == 1 and settled.stages.recompute not in (each, True):
                asked.append(settled.stages.recompute)
    return min(found, key=seconds_or_zero, default=None)
