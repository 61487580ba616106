"""Why other plans of a search of pipelines lost, and what would have to change for one to win."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

from tfpar.cluster.changed import with_links
from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.idle import with_idle_parts
from tfpar.ir.collection import collection_paused
from tfpar.pipeline import Pipeline
from tfpar.pipeline.generators import schedule_on
from tfpar.planning import Request
from tfpar.plans import Plan
from tfpar.search.price import (
    PipelineStepPricer,
    StepPricer,
    in_own_shares,
    make_step_pricer,
    price_plan,
    slowest_ranks,
)
from tfpar.search.problem import Problem
from tfpar.search.stages.choice import Ways, choose_pipeline
from tfpar.search.stages.priced import CutPlan
from tfpar.search.stages.turning import links_to_win
from tfpar.spec import MemoryLimitError, PlanError, ScheduleError

Enough = Callable[[Plan, Problem, Request], bool]
"""Whether a plan is good enough to search no more stages."""


def with_idle_times(
    plan: Plan, problems: Mapping[int, Problem], cluster: Cluster, batch_size: int | None
) -> Plan:
    """`plan` and its rivals, with what ranks wait for by what would end it; see `cost.idle`.

    Args:
        problems: as of `with_turning_point`.
        cluster: of all ranks.
        batch_size: of the step.
    """

    def explained(found: Plan) -> Plan:
        if found.stages is None or found.cost is None:
            return found
        with collection_paused():
            cut = CutPlan.of(found, problems[_actors(found)])
            assert cut is not None, "a step that trains"
            slow = slowest_ranks(PipelineStepPricer(cut, cluster), found, cluster, batch_size)
            prices = cut.prices(found, cluster, *slow)
            cost = with_idle_parts(found.cost, prices, found.stages.schedule)
            return dataclasses.replace(found, cost=cost)

    rivals = []
    for rival in plan.rivals:
        other = None if rival.plan is None else explained(rival.plan)
        cost = rival.cost if other is None else other.cost
        rivals.append(dataclasses.replace(rival, plan=other, cost=cost))
    return dataclasses.replace(explained(plan), rivals=tuple(rivals))


def with_turning_point(
    plan: Plan,
    problems: Mapping[int, Problem],
    request: Request,
    batch_size: int | None,
    enough: Enough,
) -> Plan:
    """`plan` with what links would have to be for the fastest of its rivals to be taken.

    With other links both plans get the microbatches and the schedule that suit them best there, and
    the choice between them is made as it was made here (`search.stages.choice`). What is split,
    and which layers are in which stage, stays.

    Args:
        problems: of the ranks of a stage, by number of sets of ranks.
        request: that was searched.
        batch_size: of the step.
        enough: as of the search.
    """
    at = next((i for i, rival in enumerate(plan.rivals) if rival.plan is not None), None)
    if at is None or plan.cost is None:
        return plan
    rival = plan.rivals[at]
    assert rival.plan is not None and rival.cost is not None, "a rival that was found"
    steps = {
        _actors(one): PlanAgain(one, problems[_actors(one)], request, batch_size)
        for one in (plan, rival.plan)
    }

    def is_enough(found: Plan) -> bool:  # the work alone is the same with other links
        return enough(found, problems[_actors(found)], request)

    def wins(factor: float) -> bool:
        return _taken(factor, steps, request, batch_size, is_enough) != _actors(plan)

    links = links_to_win(wins, _waits(rival.cost) > _waits(plan.cost), request.budget.start())
    rivals = list(plan.rivals)
    rivals[at] = dataclasses.replace(rival, links=links)
    return dataclasses.replace(plan, rivals=tuple(rivals))


def _taken(
    factor: float,
    steps: Mapping[int, PlanAgain],
    request: Request,
    batch_size: int | None,
    is_enough: Callable[[Plan], bool],
) -> int:
    """The number of sets of ranks of the plan that is taken with other links."""
    cluster = with_links(request.cluster, factor)

    def repriced(plan: Plan, pipeline: Pipeline) -> Plan | None:
        return steps[_actors(plan)].priced(pipeline, factor)

    def planned(pipeline: Pipeline | None) -> Plan:
        asked = pipeline or Pipeline(microbatches=1)
        found = steps[asked.order.num_actors].priced(asked, factor)
        if found is None:
            raise PlanError("It cannot run so.")
        assert found.cost is not None, "it was priced"
        if not found.fits(cluster.device.memory_bytes):
            raise MemoryLimitError("It does not fit.", found.cost.memory_bytes)
        return found

    def scheduled(plan: Plan) -> Plan:
        return steps[_actors(plan)].scheduled(plan, factor)

    ways = Ways(planned, repriced, scheduled, is_enough)
    limit = cluster.device.memory_bytes
    return _actors(choose_pipeline(sorted(steps), batch_size, ways, limit, request.mesh.size))


@dataclasses.dataclass(frozen=True, eq=False)
class PlanAgain:
    """A plan that is priced again and again: what does not hang on links is found once.

    Attributes:
        plan: that the search found.
        problem: of the ranks of a stage.
        request: that was searched.
        batch_size: of the step.
    """

    plan: Plan
    problem: Problem
    request: Request
    batch_size: int | None

    def priced(self, pipeline: Pipeline, links: float = 1.0) -> Plan | None:
        """The plan in the schedule of a pipeline, or without stages in its microbatches; None if it
        cannot run so.

        Args:
            links: how many times as fast links are.
        """
        cluster = with_links(self.request.cluster, links)
        try:
            plan = in_pipeline(self.plan, pipeline, self.problem)
            if self._step is None:
                return None
            step = self._step.on(cluster)
            return in_own_shares(step, step.price(plan), cluster, self.batch_size)
        except ScheduleError:
            return None

    def scheduled(self, plan: Plan, links: float = 1.0) -> Plan:
        """`plan`, as `priced` gives it, in the schedule that suits it best."""
        cluster = with_links(self.request.cluster, links)
        if not isinstance(self._step, PipelineStepPricer):
            return plan
        step = self._step.on(cluster)
        return in_own_shares(step, step.cut.scheduled(plan, cluster), cluster, self.batch_size)

    @functools.cached_property
    def _step(self) -> StepPricer | None:
        return make_step_pricer(self.plan, self.problem, self.request.cluster)


def _actors(plan: Plan) -> int:
    return plan.num_ranks // plan.mesh.size


def _waits(cost: Cost) -> float:
    """Seconds that links have a part in."""
    return (
        sum(cost.communication_s) - cost.hidden_s + cost.exposed_s + cost.transfer_s + cost.bubble_s
    )


def repriced_plan(
    plan: Plan, pipeline: Pipeline, problem: Problem, cluster: Cluster
) -> Plan | None:
    """`plan` with another schedule for its stages, or with other microbatches if it has none; None
    if it cannot run so."""
    try:
        return price_plan(in_pipeline(plan, pipeline, problem), problem, cluster)
    except ScheduleError:
        return None


def in_pipeline(plan: Plan, pipeline: Pipeline, problem: Problem) -> Plan:
    """A plan as a pipeline of as many sets of ranks runs it, not priced yet: its stages in a
    schedule, or without stages its microbatches, in place of chunks.

    Raises:
        ScheduleError: no schedule by name runs its stages so.
    """
    micro = pipeline.order.num_microbatches
    if plan.stages is None:
        return dataclasses.replace(
            plan,
            microbatches=micro,
            chunks=1 if micro > 1 else plan.chunks,
            batch_statistics=problem.batch_statistics,
        )
    actors = plan.stages.schedule.actors
    schedule = schedule_on(actors, micro, halves=not pipeline.recompute)
    stages = dataclasses.replace(
        plan.stages, schedule=schedule, recompute=pipeline.recompute, cost=None
    )
    return dataclasses.replace(plan, stages=stages, microbatches=schedule.num_microbatches)
