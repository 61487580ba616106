"""From a captured step to its plan where the pipeline is for the planner to find, too."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

from tfpar.cluster.description import Cluster
from tfpar.constraints import Constraint
from tfpar.constraints.stages import check_stages, least_stages
from tfpar.pipeline import AUTO, Pipeline
from tfpar.planning import Find, Request, StepSearch, as_requested
from tfpar.planning_priced import cost_on_one_device, with_shares
from tfpar.planning_rivals import Enough, repriced_plan, with_idle_times, with_turning_point
from tfpar.planning_strategies import search_strategies
from tfpar.plans import Plan
from tfpar.search.gain import LEAST_SECONDS, rhino_seconds
from tfpar.search.model.folded_model import folded_model
from tfpar.search.objective import UNCERTAINTY
from tfpar.search.problem import Problem
from tfpar.search.so_far import SearchInterrupted
from tfpar.search.stages.choice import Ways, choose_pipeline, numbers_of_stages
from tfpar.search.stages.priced import scheduled_plan
from tfpar.search.stages.promise import Promise
from tfpar.settings import Settings
from tfpar.spec import PlanError, ScheduleError, TfparError


def searching(settings: Settings, constraints: Sequence[Constraint]) -> Find:
    """What finds the plan of a training step.

    Without `pipeline=`, pipelines are searched where they can pay: see `needs_no_stages`.
    Constraints speak of a mesh as it is, which is then not divided among stages unasked.
    """
    if settings.pipeline_search is not None:
        return functools.partial(
            search_strategies, asked=settings.pipeline_search, enough=fast_as_the_work
        )
    if settings.pipeline == AUTO:
        why = "what was found is nearly as fast as the work alone, spread evenly over all ranks"
        return functools.partial(search_pipeline, enough=fast_as_the_work, why_enough=why)
    if settings.pipeline is None and not constraints and settings.chunks is None:
        return functools.partial(search_pipeline, enough=needs_no_stages)
    return as_requested


def fast_as_the_work(plan: Plan, problem: Problem, request: Request) -> bool:
    """Whether a plan is as fast as the work alone would be, spread over all ranks by their speeds,
    as near as predictions can tell."""
    assert plan.cost is not None, "a plan that was searched for"
    return plan.cost.seconds <= work_seconds(problem, request) * (1 + UNCERTAINTY)


def work_seconds(problem: Problem, request: Request) -> float:
    """What the work of a step takes at least: each rank does as much of it as it is fast, and none
    waits for another."""
    return _shared(_alone(problem, request, request.cluster))


def _alone(problem: Problem, request: Request, cluster: Cluster) -> list[float]:
    """What the work of a step takes on each of the devices, by itself."""

    def seconds(rank: int) -> float:
        return sum(cost_on_one_device(problem, cluster.part([rank])).compute_s)

    return [
        problem.known.get(("alone", device), functools.partial(seconds, rank))
        for rank, device in enumerate(cluster.devices[: request.mesh.size])
    ]


def _shared(alone: Sequence[float]) -> float:
    """What work takes if devices share it by their speeds, that it takes so long on each alone."""
    return 1 / sum(1 / seconds for seconds in alone) if all(alone) else 0.0


def _share_seconds(problem: Problem, request: Request) -> float:
    """What a rank computes that has its share of each op: all are started, whatever is split."""
    alone = _alone(problem, request, request.cluster)
    running = _alone(problem, request, request.cluster.with_device(launch_s=0.0))
    starting = max(one - other for one, other in zip(alone, running, strict=True))
    return starting + _shared(running)


def needs_no_stages(plan: Plan, problem: Problem, request: Request) -> bool:
    """Whether ranks wait little for links, or training gains less by stages, at most, than it takes
    to search them."""
    if waits_little_for_links(plan, problem, request):
        return True
    steps = request.budget.steps
    if steps is None or request.budget.seconds is not None:
        return False
    assert plan.cost is not None, "a plan that was searched for"
    search_s = max(LEAST_SECONDS, rhino_seconds(problem, folded_model(problem, 2)))
    searches = len(numbers_of_stages(request.mesh)) - 1
    gained_s = steps * (plan.cost.seconds - work_seconds(problem, request))
    return gained_s <= searches * search_s


def waits_little_for_links(plan: Plan, problem: Problem, request: Request) -> bool:
    """Whether ranks are on one machine, or wait for links less than half as long as they compute.

    Where links are slow, or devices unequal, ranks may compute more than their share for not having
    to wait: that counts as waiting.

    Between devices of one machine, what a step sums over ranks seldom takes longer than the bubble
    of a pipeline, and devices that share a processor work no less for it.
    """
    assert plan.cost is not None, "a plan that was searched for"
    if len({*request.cluster.machines[: request.mesh.size]}) == 1:
        return True
    cost = plan.cost
    waited = sum(cost.communication_s) - cost.hidden_s + cost.exposed_s
    waited += cost.transfer_s + cost.bubble_s
    computed = sum(cost.compute_s)
    if waited > computed / 2:
        return False
    most = min(computed, _share_seconds(problem, request))
    return waited + computed - most <= most / 2


def search_pipeline(
    search: StepSearch,
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
        As `planning.StepSearch`.
    """
    check_stages(request.constraints, request.mesh.size)
    search.check_room(request)
    problems: dict[int, Problem] = {}

    report, limit = request.report, request.cluster.device.memory_bytes

    def told(plan: Plan | None) -> Plan | None:
        if plan is not None and plan.cost is not None and plan.cost.memory_bytes <= limit:
            report.found(plan.cost.seconds)
        return plan

    def asked(pipeline: Pipeline | None) -> Request:
        actors = 1 if pipeline is None else pipeline.order.num_actors
        return dataclasses.replace(request, mesh=request.mesh.divided(actors), pipeline=pipeline)

    def promised(pipeline: Pipeline | None) -> Promise | None:
        with report.at(_name(pipeline)), contextlib.suppress(TfparError):  # `planned` says it
            return search.promise(asked(pipeline))
        return None

    def planned(pipeline: Pipeline | None) -> Plan:
        actors = 1 if pipeline is None else pipeline.order.num_actors
        with report.at(_name(pipeline)):
            plan, problems[actors] = search(asked(pipeline))
        _check_work(plan)
        told(plan)
        return plan

    def shared(plan: Plan | None, before: Plan, problem: Problem) -> Plan | None:
        """A plan that was priced in equal shares, in those that suit it if they paid `before`."""
        if plan is None or not before.shares:
            return plan
        return with_shares(plan, problem, request.cluster, batch_size)

    def repriced(plan: Plan, pipeline: Pipeline) -> Plan | None:
        with report.at(_name(pipeline)):
            problem = problems[pipeline.order.num_actors]
            equal = dataclasses.replace(plan, shares={})
            found = repriced_plan(equal, pipeline, problem, request.cluster)
            return told(shared(found, plan, problem))

    def is_enough(plan: Plan) -> bool:
        return enough(plan, problems[plan.num_ranks // plan.mesh.size], request)

    def scheduled(plan: Plan) -> Plan:
        assert plan.stages is not None, "a plan with stages"
        problem = problems[plan.stages.num_actors]
        with report.at(f"schedules of {_name(plan.pipeline)}"):
            equal = dataclasses.replace(plan, shares={})
            found = shared(scheduled_plan(equal, problem, request.cluster), plan, problem)
        told(found)
        return found or plan

    def restaged(plan: Plan, pipeline: Pipeline) -> Plan | None:
        if least_stages(request.constraints) > 1:  # which number stages as they are
            return None
        problem = problems[pipeline.order.num_actors]
        with report.at(_name(pipeline)):
            try:
                equal = dataclasses.replace(plan, shares={})
                cut = search.restaged(equal, asked(pipeline))
                found = scheduled_plan(cut, problem, request.cluster)
            except (PlanError, ScheduleError):
                return None
            return told(shared(found, plan, problem))

    stages = numbers_of_stages(request.mesh, least_stages(request.constraints))
    ways = Ways(planned, repriced, scheduled, is_enough, why_enough, promised, restaged)
    plan = choose_pipeline(stages, batch_size, ways, limit, request.mesh.size)
    if plan.cost is None and why_enough:  # what is to be told was asked for
        raise PlanError(
            f"Planner {plan.planner!r} says nothing of what its plans cost, by which pipelines are "
            f"compared. Give a tap.Pipeline instead of 'auto'."
        )
    if why_enough:
        with report.at("what would have to change for the runner-up"):
            try:
                plan = with_idle_times(plan, problems, request.cluster, batch_size)
                plan = with_turning_point(plan, problems, request, batch_size, enough)
            except KeyboardInterrupt:
                found = functools.partial(dataclasses.replace, plan, cut_short=True)
                raise SearchInterrupted(found) from None
    return plan, problems[plan.num_ranks // plan.mesh.size]


def _name(pipeline: Pipeline | None) -> str:
    """`2 stages, 8 microbatches`."""
    if pipeline is None:
        return "no stages"
    stages, count = pipeline.order.num_stages, pipeline.order.num_microbatches
    again = ", recomputing" if pipeline.recompute else ""
    return f"{f'{stages} stages' if stages > 1 else 'no stages'}, {count} microbatches{again}"


def _check_work(plan: Plan) -> None:
    """Raise PlanError if a stage has nothing to do: as many are not worth comparing."""
    cost = None if plan.stages is None else plan.stages.cost
    for stage, share in enumerate(() if cost is None else cost.stages):
        if not share.forward_s + share.backward_s + share.update_s:
            raise PlanError(f"Stage {stage} would have no work. Ask for fewer stages.")
