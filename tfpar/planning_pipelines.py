"""From a captured step to its plan where the pipeline is for the planner to find, too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from tfpar.constraints import PutInStage
from tfpar.constraints.stages import check_stages
from tfpar.ir.step import StepGraph
from tfpar.pipeline import Pipeline
from tfpar.planning import Interrupted, Request, cost_on_one_device, price_whole, search_plan
from tfpar.plans import Plan
from tfpar.search.cache import PlanCache
from tfpar.search.microbatches import in_microbatches
from tfpar.search.problem import Planner, Problem, step_anchors
from tfpar.search.recompute import recomputed_problem
from tfpar.search.stages.choice import Ways, choose_pipeline, numbers_of_stages
from tfpar.search.stages.priced import price_plan
from tfpar.spec import PlanError, ScheduleError, Spec


def search_pipeline(
    step: StepGraph,
    request: Request,
    batch_size: int | None,
    planner: Planner,
    cache: PlanCache | None,
    laid: Mapping[str, Spec] | None = None,
    state_ratio: float | None = None,
    part: bool = False,
    interrupted: Interrupted | None = None,
) -> tuple[Plan, Problem]:
    """The best plan of all pipelines for a training step, and of none; see `choose_pipeline`.

    Args: as of `planning.search_plan`; the request has all ranks and no pipeline.

    Raises:
        As `planning.search_plan`.
    """
    check_stages(request.constraints, request.mesh.size)
    problems: dict[int, Problem] = {}
    search = functools.partial(
        search_plan,
        step,
        batch_size=batch_size,
        planner=planner,
        cache=cache,
        laid=laid,
        state_ratio=state_ratio,
        part=part,
        interrupted=interrupted,
    )

    def planned(pipeline: Pipeline | None) -> Plan:
        actors = 1 if pipeline is None else pipeline.order.num_actors
        asked = dataclasses.replace(request, mesh=request.mesh.divided(actors), pipeline=pipeline)
        plan, problems[actors] = search(asked)
        if plan.cost is None:
            raise PlanError(
                f"Planner {plan.planner!r} says nothing of what its plans cost, by which "
                f"pipelines are compared. Give a tap.Pipeline instead of 'auto'."
            )
        return plan

    def repriced(plan: Plan, pipeline: Pipeline) -> Plan | None:
        return _repriced(plan, pipeline, problems[pipeline.order.num_actors], request)

    @functools.cache
    def least_s() -> float:
        alone = cost_on_one_device(next(iter(problems.values())), request.cluster)
        return sum(alone.compute_s) / request.mesh.size

    stages = numbers_of_stages(request.mesh, _least_stages(request))
    ways = Ways(planned, repriced, least_s)
    plan = choose_pipeline(stages, batch_size, ways, request.cluster.device.memory_bytes)
    return plan, problems[plan.num_ranks // plan.mesh.size]


def _least_stages(request: Request) -> int:
    """As many stages as constraints speak of."""
    named = [c.index + 1 for c in request.constraints if isinstance(c, PutInStage)]
    return max(named, default=1)


def _repriced(plan: Plan, pipeline: Pipeline, problem: Problem, request: Request) -> Plan | None:
    """`plan` with another schedule for its stages, or with other microbatches if it has none."""
    schedule = pipeline.order
    if plan.stages is None:
        cost, _ = price_whole(plan, problem)
        again = recomputed_problem(
            dataclasses.replace(problem, microbatches=schedule.num_microbatches), plan.recompute
        )
        whole = dataclasses.replace(plan, cost=cost)
        return in_microbatches(whole, again, step_anchors(plan, again))
    stages = dataclasses.replace(
        plan.stages, schedule=schedule, recompute=pipeline.recompute, cost=None
    )
    plan = dataclasses.replace(plan, stages=stages, microbatches=schedule.num_microbatches)
    try:
        priced = price_plan(plan, problem, request.cluster)
    except ScheduleError:
        return None
    if priced is None:
        return None
    cost, staged = priced
    return dataclasses.replace(plan, cost=cost, stages=dataclasses.replace(stages, cost=staged))
