"""Price of a plan in another pipeline: its microbatches or its schedule."""

from __future__ import annotations

import dataclasses

from tfpar.cluster.description import Cluster
from tfpar.pipeline import Pipeline
from tfpar.pipeline.generators import schedule_on
from tfpar.planning.pricing.price import SingleStagePricer, price_plan
from tfpar.planning.problem import Problem
from tfpar.plans import Plan
from tfpar.spec import ScheduleError


def price_in_microbatches(plan: Plan, problem: Problem) -> Plan:
    """Price `plan` in the microbatches of the problem."""
    plan = dataclasses.replace(
        plan,
        microbatches=problem.batch.microbatches,
        batch_statistics=problem.batch.batch_statistics,
    )
    if plan.cost is None:
        return plan
    return SingleStagePricer.of(plan, problem, problem.cluster).price(plan)


def reprice_plan(plan: Plan, pipeline: Pipeline, problem: Problem, cluster: Cluster) -> Plan | None:
    """Price `plan` with another schedule for its stages, or with other microbatches if it has none;
    None if it cannot run so."""
    try:
        return price_plan(apply_schedule(plan, pipeline, problem), problem, cluster)
    except ScheduleError:
        return None


def apply_schedule(plan: Plan, pipeline: Pipeline, problem: Problem) -> Plan:
    """Return the plan in another pipeline of as many actors, not priced yet: its stages in a
    schedule, or without stages its microbatches, in place of chunks.

    Raises:
        ScheduleError: no schedule by name runs its stages so.
    """
    micro = pipeline.num_microbatches
    if plan.stages is None:
        return dataclasses.replace(
            plan,
            microbatches=micro,
            chunks=1 if micro > 1 else plan.chunks,
            batch_statistics=problem.batch.batch_statistics,
        )
    actors = plan.stages.schedule.actors
    schedule = schedule_on(actors, micro, halves=not pipeline.recompute)
    stages = dataclasses.replace(
        plan.stages, schedule=schedule, recompute=pipeline.recompute, cost=None
    )
    return dataclasses.replace(plan, stages=stages, microbatches=schedule.num_microbatches)
