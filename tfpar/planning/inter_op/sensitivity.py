"""Sensitivity of a choice among pipelines: why the others lost, and how fast links would have to be
for the next one to be taken."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cluster.scaling import scale_bandwidth
from tfpar.cost.cost import Cost
from tfpar.cost.pipeline_cost_model import split_idle_time
from tfpar.ir.collection import collection_paused
from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import (
    BestSchedule,
    FewerRecomputed,
    Groups,
    NewLayout,
    Order,
    OtherMicrobatches,
    OtherStages,
    Proposal,
    SolvedCandidate,
)
from tfpar.planning.drive import SearchResult, search_plan
from tfpar.planning.inter_op.enumerate_pipelines import EnumeratePipelines
from tfpar.planning.inter_op.relaxed_estimate import RelaxedEstimate
from tfpar.planning.inter_op.stages.break_even import find_break_even_factor
from tfpar.planning.inter_op.stages.pipeline_pricing import PipelinePricer
from tfpar.planning.inter_op.stopping import Enough
from tfpar.planning.pricing.price import (
    PipelineStepPricer,
    StepPricer,
    make_step_pricer,
    price_on,
    price_own_shares,
    slowest_views,
)
from tfpar.planning.pricing.repricing import apply_schedule
from tfpar.planning.request import PlanRequest
from tfpar.plans import Candidate, Plan
from tfpar.spec import MemoryLimitError, PlanError, ScheduleError


def attach_idle_times(result: SearchResult, cluster: Cluster, batch_size: int | None) -> Plan:
    """Attach to the best plan and its rivals the time that ranks wait, by what would end it
    (`cost.pipeline_cost_model`).

    Args:
        cluster: of all ranks.
        batch_size: of the step.
    """

    def explain(candidate: SolvedCandidate) -> Plan:
        plan = candidate.plan
        if plan.stages is None or plan.cost is None:
            return plan
        with collection_paused():
            cut = PipelinePricer.of(plan, candidate.problem)
            views = slowest_views(PipelineStepPricer(cut, cluster), plan, cluster, batch_size)
            prices = cut.prices(plan, cluster, views)
            cost = split_idle_time(plan.cost, prices, plan.stages.schedule)
            return plan.with_findings(cost=cost)

    best = explain(result.best)
    rivals = list(best.findings.rivals)
    for at, other in enumerate(map(explain, result.others)):
        rivals[at] = Candidate.priced(rivals[at].name, other.cost, plan=other)
    return best.with_findings(rivals=tuple(rivals))


def attach_break_even(
    plan: Plan,
    result: SearchResult,
    request: PlanRequest,
    batch_size: int | None,
    enough: Enough,
    trains: bool = True,
) -> Plan:
    """Attach to the fastest of the rivals of `plan` how it is found out how fast links would have
    to be for it to be taken: that takes as long as a good part of the search.

    With other links both plans get the microbatches and the schedule that suit them best there, and
    the choice between them is made as it was made here (`EnumeratePipelines`). What is split, and
    which layers are in which stage, stays.

    Args:
        plan: the best of `result`.
        request: that was searched.
        batch_size: of the step.
        enough, trains: as of the search.
    """
    if not result.others or plan.cost is None:
        return plan
    best, rival = (dataclasses.replace(result.best, plan=plan), result.others[0])
    if best.num_actors == rival.num_actors:
        return plan  # which would be the choice of no search of stages
    steps = {
        one.num_actors: PlanRepricer(one, request.cluster, batch_size) for one in (best, rival)
    }

    def wins(factor: float) -> bool:
        evaluator = LinkFactorEvaluator(steps, request, factor, enough)
        limit = evaluator.cluster.device.memory_bytes
        search = EnumeratePipelines(
            evaluator, sorted(steps), batch_size, limit, request.mesh.size, trains=trains
        )
        return search_plan(search, evaluator).best.num_actors != best.num_actors

    rival_found, *rest = plan.findings.rivals
    cost = rival_found.cost
    assert cost is not None, "a rival that was found"
    faster = _waits(cost) > _waits(plan.cost)

    @functools.cache
    def find_links() -> float | None:
        return find_break_even_factor(wins, faster, request.budget.start())

    rival_found = dataclasses.replace(rival_found, find_links=find_links)
    return plan.with_findings(rivals=(rival_found, *rest))


class LinkFactorEvaluator:
    """Candidates that were found, repriced with links that are faster or slower; see
    `drive.Evaluator`.

    Args:
        steps: by number of actors.
        factor: how many times as fast links are.
        enough: as of the search.
    """

    def __init__(
        self,
        steps: Mapping[int, PlanRepricer],
        request: PlanRequest,
        factor: float,
        enough: Enough,
    ) -> None:
        self.cluster = scale_bandwidth(request.cluster, factor)
        self._steps, self._request, self._enough = steps, request, enough

    def evaluate(self, proposal: Proposal) -> SolvedCandidate | None:
        match proposal:
            case NewLayout(pipeline):
                return self._planned(pipeline or Pipeline(microbatches=1))
            case OtherMicrobatches(base, pipeline):
                plan = self._steps[base.num_actors].price(pipeline, self.cluster)
                return None if plan is None else SolvedCandidate.of(plan, base.problem)
            case BestSchedule(base):
                plan = self._steps[base.num_actors].schedule(base.plan, self.cluster)
                return SolvedCandidate.of(plan, base.problem)
            case OtherStages() | FewerRecomputed():
                return None
        return proposal.base

    def estimate(self, pipeline: Pipeline | None) -> RelaxedEstimate | None:
        return None

    def bound(self, pipeline: Pipeline | None) -> Cost | None:
        return None

    def is_good_enough(self, candidate: SolvedCandidate) -> bool:
        return self._enough(candidate, self._request)  # compute is the same with other links

    def machine_types(self, pipeline: Pipeline | None, ranks: Order) -> Sequence[Cluster | None]:
        return [None]

    def unlike_groups(self, given: SolvedCandidate) -> Sequence[Groups]:
        return []

    def rank_orders(
        self, pipeline: Pipeline | None, given: SolvedCandidate | None
    ) -> Sequence[Order]:
        return []

    def _planned(self, pipeline: Pipeline) -> SolvedCandidate:
        step = self._steps[pipeline.num_actors]
        plan = step.price(pipeline, self.cluster)
        if plan is None:
            raise PlanError("It cannot run so.")
        assert plan.cost is not None, "it was priced"
        if not plan.fits(self.cluster.device.memory_bytes):
            raise MemoryLimitError("It does not fit.", plan.cost.memory_bytes)
        return SolvedCandidate.of(plan, step.candidate.problem)


@dataclasses.dataclass(frozen=True, eq=False)
class PlanRepricer:
    """Pricer of a candidate at other link speeds: what does not depend on links is computed once.

    Attributes:
        cluster: of all ranks.
        batch_size: of the step.
    """

    candidate: SolvedCandidate
    cluster: Cluster
    batch_size: int | None

    def price(self, pipeline: Pipeline, cluster: Cluster | None = None) -> Plan | None:
        """Price the plan in the schedule of a pipeline, or without stages in its microbatches; None
        if it cannot run so.

        Args:
            cluster: other machines of as many ranks.
        """
        cluster = cluster or self.cluster
        try:
            plan = apply_schedule(self.candidate.plan, pipeline, self.candidate.problem)
            return price_on(self._step.on(cluster), plan, cluster, self.batch_size)
        except ScheduleError:
            return None

    def schedule(self, plan: Plan, cluster: Cluster | None = None) -> Plan:
        """Return `plan`, as `price` gives it, in the schedule that suits it best."""
        cluster = cluster or self.cluster
        if not isinstance(self._step, PipelineStepPricer):
            return plan
        step = self._step.on(cluster)
        return price_own_shares(step, step.cut.scheduled(plan, cluster), cluster, self.batch_size)

    @functools.cached_property
    def _step(self) -> StepPricer:
        return make_step_pricer(self.candidate.plan, self.candidate.problem, self.cluster)


def _waits(cost: Cost) -> float:
    """Seconds that links have a part in."""
    return (
        sum(cost.communication_s) - cost.hidden_s + cost.exposed_s + cost.transfer_s + cost.bubble_s
    )
