"""Why other plans of a search of pipelines lost, and what would have to change for one to win."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

from tfpar.cluster.changed import with_links
from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.evaluate import evaluate
from tfpar.cost.idle import with_idle_parts
from tfpar.ir.collection import collection_paused
from tfpar.ir.roles import Roles
from tfpar.pipeline import Pipeline
from tfpar.pipeline.generators import schedule_on
from tfpar.planning import Request
from tfpar.planning_priced import step_by_rank
from tfpar.plans import Plan
from tfpar.propagation.partitioned import PartitionedGraph
from tfpar.search.as_planned import as_planned
from tfpar.search.laid import lay_out, price_whole, priced_roles
from tfpar.search.microbatches import in_microbatches
from tfpar.search.problem import Problem, step_anchors
from tfpar.search.shares import Priced, StepOfStages, in_own_shares, slowest_ranks
from tfpar.search.stages.choice import Ways, choose_pipeline
from tfpar.search.stages.priced import CutPlan, priced_plan
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
            slow = slowest_ranks(StepOfStages(cut, cluster), found, cluster, batch_size)
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
        if self.plan.stages is None:
            return self._whole(pipeline.order.num_microbatches, links)
        cut, cluster = self._cut, self._cluster(links)
        try:
            plan = in_schedule(self.plan, pipeline)
            return None if cut is None else self._in_shares(cut.priced(plan, cluster), cluster)
        except ScheduleError:
            return None

    def scheduled(self, plan: Plan, links: float = 1.0) -> Plan:
        """`plan`, as `priced` gives it, in the schedule that suits it best."""
        cut, cluster = self._cut, self._cluster(links)
        return plan if cut is None else self._in_shares(cut.scheduled(plan, cluster), cluster)

    def _in_shares(self, plan: Plan, cluster: Cluster) -> Plan:
        """`plan`, priced in equal shares, in those that it has."""
        if not plan.uneven_meshes(self.batch_size):
            return plan
        if plan.stages is not None and self._cut is not None:
            step: Priced | None = StepOfStages(self._cut, cluster)
        else:
            step = step_by_rank(plan, self.problem, cluster)
        return plan if step is None else in_own_shares(step, plan, cluster, self.batch_size)

    def _cluster(self, links: float) -> Cluster:
        return with_links(self.request.cluster, links)

    @functools.cached_property
    def _cut(self) -> CutPlan | None:
        return CutPlan.of(self.plan, self.problem)

    def _whole(self, microbatches: int, links: float) -> Plan:
        """Without stages: laid once, and priced as a search prices it."""
        problem, laid, roles = self._laid
        machines = with_links(problem.cluster, links)
        cost = evaluate(laid, machines, roles, problem.state_ratio)
        plan = dataclasses.replace(self.plan, cost=cost, microbatches=1)
        if microbatches > 1:
            again = dataclasses.replace(problem, cluster=machines, microbatches=microbatches)
            plan = in_microbatches(plan, again, step_anchors(plan, again))
        return self._in_shares(plan, machines)

    @functools.cached_property
    def _laid(self) -> tuple[Problem, PartitionedGraph, Roles]:
        problem = as_planned(self.problem, self.plan)
        laid = lay_out(self.plan, self.problem)
        return problem, laid, priced_roles(laid, problem)


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
    """`plan` with another schedule for its stages, or with other microbatches if it has none."""
    schedule = pipeline.order
    if plan.stages is None:
        cost, _ = price_whole(plan, problem)
        again = dataclasses.replace(
            as_planned(problem, plan), microbatches=schedule.num_microbatches
        )
        whole = dataclasses.replace(plan, cost=cost)
        return in_microbatches(whole, again, step_anchors(plan, again))
    try:
        return priced_plan(in_schedule(plan, pipeline), problem, cluster)
    except ScheduleError:
        return None


def in_schedule(plan: Plan, pipeline: Pipeline) -> Plan:
    """A plan with stages as a pipeline of as many sets of ranks runs them, not priced yet.

    Raises:
        ScheduleError: no schedule by name runs them so.
    """
    assert plan.stages is not None, "a plan with stages"
    actors, micro = plan.stages.schedule.actors, pipeline.order.num_microbatches
    schedule = schedule_on(actors, micro, halves=not pipeline.recompute)
    stages = dataclasses.replace(
        plan.stages, schedule=schedule, recompute=pipeline.recompute, cost=None
    )
    return dataclasses.replace(plan, stages=stages, microbatches=schedule.num_microbatches)
