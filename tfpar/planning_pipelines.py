"""From a captured step to its plan where the pipeline is for the planner to find, too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from tfpar.constraints import Constraint, PutInStage
from tfpar.constraints.stages import check_stages
from tfpar.pipeline import AUTO, Pipeline
from tfpar.planning import (
    Find,
    Request,
    Search,
    as_requested,
    cost_on_one_device,
    price_whole,
)
from tfpar.plans import Plan
from tfpar.search.microbatches import in_microbatches
from tfpar.search.objective import UNCERTAINTY
from tfpar.search.problem import Problem, step_anchors
from tfpar.search.recompute import recomputed_problem
from tfpar.search.stages.choice import Ways, choose_pipeline, numbers_of_stages
from tfpar.search.stages.priced import priced_plan, scheduled_plan
from tfpar.settings import Settings
from tfpar.spec import PlanError, ScheduleError

Enough = Callable[[Plan, Problem, Request], bool]
"""Whether a plan is good enough to search no more stages."""


def searching(settings: Settings, constraints: Sequence[Constraint]) -> Find:
    """What finds the plan of a training step.

    Without `pipeline=`, pipelines are searched where they can pay: see `waits_little_for_links`.
    Constraints speak of a mesh as it is, which is then not divided among stages unasked.
    """
    if settings.pipeline == AUTO:
        why = "what was found is nearly as fast as the work alone, spread evenly over all ranks"
        return functools.partial(search_pipeline, enough=fast_as_the_work, why_enough=why)
    if settings.pipeline is None and not constraints and settings.chunks is None:
        return functools.partial(search_pipeline, enough=waits_little_for_links)
    return as_requested


def fast_as_the_work(plan: Plan, problem: Problem, request: Request) -> bool:
    """Whether a plan is as fast as the work alone would be, spread evenly over all ranks, as near
    as predictions can tell."""
    assert plan.cost is not None, "a plan that was searched for"
    alone = cost_on_one_device(problem, request.cluster)
    least = sum(alone.compute_s) / request.mesh.size
    return plan.cost.seconds <= least * (1 + UNCERTAINTY)


def waits_little_for_links(plan: Plan, problem: Problem, request: Request) -> bool:
    """Whether ranks are on one machine, or wait for links less than half as long as they compute.

    Between devices of one machine, what a step sums over ranks seldom takes longer than the bubble
    of a pipeline, and devices that share a processor work no less for it.
    """
    assert plan.cost is not None, "a plan that was searched for"
    if len({*request.cluster.machines[: request.mesh.size]}) == 1:
        return True
    cost = plan.cost
    waited = sum(cost.communication_s) - cost.hidden_s + cost.exposed_s + cost.bubble_s
    return waited <= sum(cost.compute_s) / 2


def search_pipeline(
    search: Search,
    request: Request,
    batch_size: int | None,
    *,
    enough: Enough,
    why_enough: str = "",
) -> tuple[Plan, Problem]:
    """The best plan of all pipelines for a training step, and of none; see `choose_pipeline`.

    Args:
        search: finds the plan for what is requested.
        request: has all ranks and no pipeline.
        batch_size: of the step.
        enough, why_enough: see `search.stages.choice.Ways`.

    Raises:
        As `planning.search_plan`.
    """
    check_stages(request.constraints, request.mesh.size)
    problems: dict[int, Problem] = {}

    def planned(pipeline: Pipeline | None) -> Plan:
        actors = 1 if pipeline is None else pipeline.order.num_actors
        asked = dataclasses.replace(request, mesh=request.mesh.divided(actors), pipeline=pipeline)
        plan, problems[actors] = search(asked)
        _check_work(plan)
        return plan

    def repriced(plan: Plan, pipeline: Pipeline) -> Plan | None:
        return _repriced(plan, pipeline, problems[pipeline.order.num_actors], request)

    def is_enough(plan: Plan) -> bool:
        return enough(plan, problems[plan.num_ranks // plan.mesh.size], request)

    def scheduled(plan: Plan) -> Plan:
        assert plan.stages is not None, "a plan with stages"
        problem = problems[plan.stages.num_actors]
        return scheduled_plan(plan, problem, request.cluster) or plan

    stages = numbers_of_stages(request.mesh, _least_stages(request))
    ways = Ways(planned, repriced, scheduled, is_enough, why_enough)
    plan = choose_pipeline(stages, batch_size, ways, request.cluster.device.memory_bytes)
    if plan.cost is None and why_enough:  # what is to be told was asked for
        raise PlanError(
            f"Planner {plan.planner!r} says nothing of what its plans cost, by which pipelines are "
            f"compared. Give a tap.Pipeline instead of 'auto'."
        )
    return plan, problems[plan.num_ranks // plan.mesh.size]


def _least_stages(request: Request) -> int:
    """As many stages as constraints speak of."""
    named = [c.index + 1 for c in request.constraints if isinstance(c, PutInStage)]
    return max(named, default=1)


def _check_work(plan: Plan) -> None:
    """Raise PlanError if a stage has nothing to do: as many are not worth comparing."""
    cost = None if plan.stages is None else plan.stages.cost
    for stage, share in enumerate(() if cost is None else cost.stages):
        if not share.forward_s + share.backward_s + share.update_s:
            raise PlanError(f"Stage {stage} would have no work. Ask for fewer stages.")


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
        return priced_plan(plan, problem, request.cluster)
    except ScheduleError:
        return None
