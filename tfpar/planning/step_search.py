"""`StepSearch`: finds plans of one captured and simplified step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from tfpar.cluster.description import Cluster, Device
from tfpar.cluster.network import likeness
from tfpar.constraints import PutInStage
from tfpar.cost.cost import Cost
from tfpar.ir.roles import BACKWARD, Roles
from tfpar.ir.step import StepGraph
from tfpar.pipeline import Pipeline
from tfpar.planning.cache import PlanCache
from tfpar.planning.candidates import (
    BalancedShares,
    BestSchedule,
    FewerRecomputed,
    Groups,
    NewLayout,
    Order,
    OtherMicrobatches,
    OtherStages,
    Proposal,
    SolvedCandidate,
    describe_pipeline,
)
from tfpar.planning.completion import balance_shares
from tfpar.planning.deadline import Deadline
from tfpar.planning.drive import search_plan
from tfpar.planning.incumbent import IncumbentCallback, MakePlan, SearchInterrupted
from tfpar.planning.inter_op.fewer_recomputed import recompute_fewer
from tfpar.planning.inter_op.machine_order import (
    ActorSlots,
    PlacementWorkload,
    fastest_groups,
    fastest_orders,
)
from tfpar.planning.inter_op.machine_types import search_machine_types
from tfpar.planning.inter_op.pipeline_options import FILLED
from tfpar.planning.inter_op.placing import GivenPipeline
from tfpar.planning.inter_op.relaxed_estimate import RelaxedEstimate, estimate_relaxed
from tfpar.planning.inter_op.stage_planner import assign_stages
from tfpar.planning.inter_op.stages.pipeline_pricing import price_best_schedule
from tfpar.planning.inter_op.stopping import Enough, compute_bound
from tfpar.planning.lower_bound import cost_on_one_device
from tfpar.planning.memory.memory_errors import check_room
from tfpar.planning.memory.stages import StagedFit, StageStep
from tfpar.planning.meshes import LogicalMesh
from tfpar.planning.objective import UNCERTAINTY
from tfpar.planning.pricing.price import make_step_pricer, price_on, price_plan
from tfpar.planning.pricing.repricing import reprice_plan
from tfpar.planning.problem import Planner, Problem
from tfpar.planning.problems import StepProblems
from tfpar.planning.request import PlanRequest
from tfpar.planning.solve import Interrupted, find_plan, interruptible
from tfpar.plans import Plan
from tfpar.plans.equivalence import execution_key
from tfpar.plans.shares import has_unequal_shares, with_equal_shares
from tfpar.spec import Mesh, PlanError, ScheduleError, Spec, TfparError

Layouts = dict[Hashable, Plan]
"""Layouts that were found, by all that tells them apart."""


@dataclasses.dataclass(eq=False)
class StepSearch:
    """Finds plans of one step for what is requested; what it finds out serves all requests.

    Attributes:
        step, batch_size, laid, state_ratio, part: as of `StepProblems`.
        planner, cache, interrupted: as of `find_plan`.
    """

    step: StepGraph
    batch_size: int | None
    planner: Planner
    cache: PlanCache | None = None
    laid: Mapping[str, Spec] | None = None
    state_ratio: float | None = None
    part: bool = False
    interrupted: Interrupted | None = None

    def __post_init__(self) -> None:
        self._problems = StepProblems(
            self.step, self.batch_size, self.laid, self.state_ratio, self.part
        )
        self._has_told_of_miss = False

    @functools.cached_property
    def trains(self) -> bool:
        """Whether the step has a backward pass."""
        roles = Roles.of(self.step.graph, self.step.gradient_tensors)
        return BACKWARD in roles.phase.values()

    def __call__(self, request: PlanRequest) -> tuple[Plan, Problem]:
        """The plan that is found for a request as it is, and its problem.

        Raises:
            SpecError: a constraint that matches nothing or cannot hold.
            PlanError: no plan satisfies the constraints, or fits under them (a MemoryLimitError);
                says which of them conflict.
            ScheduleError: the pipeline's schedule can never end with the stages that it has.
            SearchInterrupted: Ctrl-C; knows the best plan so far.
        """
        evaluator = StepEvaluator(self, request)
        best = search_plan(GivenPipeline(evaluator, request.pipeline), evaluator).best
        return best.plan, best.problem

    def problem(self, request: PlanRequest) -> Problem:
        """State the problem of a request, as `StepProblems.state`."""
        return self._problems.state(request)

    def check_room(self, request: PlanRequest) -> None:
        """Check that the devices of the request have room for the step at all, in stages or
        without.

        Raises:
            MemoryLimitError: they have not.
        """
        problem, devices = self.problem(request), request.cluster.devices[: request.mesh.size]
        check_room(problem, [device.memory_bytes for device in devices])

    def find_layout(self, problem: Problem, request: PlanRequest, known: Layouts) -> Plan:
        """Find the layout of the ranks of one stage: one for equal machines, wherever they are.

        Args:
            known: those that were found before, to which it is added.

        Raises:
            As of a call.
        """
        asked = request.pipeline, request.meshes, request.mesh
        key = *asked, likeness(problem.cluster), problem.memory_limit
        if key in known:
            return known[key]

        def relaxed(kept: Collection[str]) -> Problem:
            return self._problems.relax(request, kept).on(problem.cluster)

        def missed(asked: Problem) -> None:
            if self.cache is not None and not self._has_told_of_miss:
                self._has_told_of_miss = True  # what follows is nearest to what is kept by then
                request.progress.note(self.cache.nearest(asked, self.planner))

        known[key] = find_plan(problem, self.planner, self.cache, relaxed, self.interrupted, missed)
        return known[key]

    def assign_stages(
        self,
        layout: Plan,
        request: PlanRequest,
        known: Layouts,
        ranks: Order = (),
        before: Plan | None = None,
        deadline: Deadline | None = None,
    ) -> Plan:
        """Assign `layout` to the stages of the request's pipeline, not priced yet; see
        `stage_planner.assign_stages`.

        Args:
            known: layouts that were found before, to which those are added of actors that have more
                or fewer ranks than the first.
        """
        assert request.pipeline is not None, "a request for stages"

        def other_layout(actor: int) -> Plan:
            asked = dataclasses.replace(request.of_actor(actor), ranks=ranks or request.ranks)
            return self.find_layout(self.problem(asked), asked, known)

        return assign_stages(
            layout,
            self.step,
            request.pipeline,
            request.cluster,
            request.constraints,
            sizes=request.sizes,
            owners=request.owners,
            part=self.part,
            ranks=ranks,
            before=before,
            deadline=deadline or request.budget.start(),
            memo=None if self.part else self._problems.graph_memo,
            jit_compile=request.jit_compile,
            other_layout=other_layout,
            limits=request.limits,
        )

    def reprice(self, plan: Plan, request: PlanRequest, everyone: Mesh) -> Plan:
        """Price a plan in force on the machines of a request.

        Args: as of `repricer`.
        """
        return self.repricer(plan, request, everyone)(request.cluster)

    def repricer(
        self, plan: Plan, request: PlanRequest, everyone: Mesh
    ) -> Callable[[Cluster], Plan]:
        """Return the pricer of a plan on any machines of as many ranks, which computes once all
        that does not depend on machines.

        Args:
            request: of the same step; stages and microbatches are the plan's.
            everyone: all ranks, in their physical shape.
        """
        stages = plan.stages
        asked = dataclasses.replace(
            request,
            base=None,
            mesh=everyone if stages is None else everyone.sized(plan.mesh.size),
            pipeline=plan.pipeline,
            ranks=None if stages is None else stages.ranks,
            num_ranks=everyone.size,
        )
        step = make_step_pricer(plan, self.problem(asked), asked.cluster)

        def price(cluster: Cluster) -> Plan:
            priced = price_on(step.on(cluster), plan, cluster, self.batch_size)
            return dataclasses.replace(priced, cluster=cluster)

        return price

    def estimate(self, request: PlanRequest) -> RelaxedEstimate | None:
        """Return the relaxed estimate of the request's pipeline, with a second forward pass if the
        fastest plan does not fit; None if a plan is known already, or there is none.

        Raises:
            SpecError: as of a call.
            SearchInterrupted: as of a call.
            KeyboardInterrupt: Ctrl-C; of the ranks of a stage nothing is known.
        """
        problem = self.problem(request)
        if self.cache is not None and self.cache.get(problem, self.planner) is not None:
            return None
        types = request.machine_types(request.ranks or ())
        interrupted = self.interrupted if request.num_actors == 1 else {}
        with request.progress.at("", request.budget.seconds):
            try:
                with interruptible(problem, self.planner, interrupted) as asked:
                    return estimate_relaxed(asked, self.planner, request.pipeline, types)
            except PlanError:
                return None
            except SearchInterrupted:
                if request.num_actors == 1:
                    raise
                raise KeyboardInterrupt from None


class StepEvaluator:
    """Makes candidates of proposals for a step; see `drive.Evaluator`.

    Args:
        request: with the pipeline that is given, or with all ranks and none.
        enough: whether a candidate is good enough to search no more stages.
    """

    def __init__(
        self, search: StepSearch, request: PlanRequest, enough: Enough | None = None
    ) -> None:
        self._search = search
        self._request = request
        self._enough = enough
        self._layouts: Layouts = {}
        self._evaluated: dict[Hashable, set[Hashable]] = {}

    def evaluate(self, proposal: Proposal) -> SolvedCandidate | None:
        with self._request.progress.at(self._label(proposal)):
            match proposal:
                case NewLayout():
                    candidate = self._lay_out(proposal)
                case OtherMicrobatches(base, pipeline):
                    equal = with_equal_shares(base.plan)
                    plan = reprice_plan(equal, pipeline, base.problem, self._request.cluster)
                    candidate = self._in_shares_of(base, plan)
                case BestSchedule(base):
                    equal = with_equal_shares(base.plan)
                    plan = price_best_schedule(equal, base.problem, self._request.cluster)
                    candidate = self._in_shares_of(base, plan)
                case OtherStages(base, pipeline):
                    candidate = self._in_shares_of(base, self._cut_again(base, pipeline))
                case FewerRecomputed(base):
                    candidate = self._in_shares_of(base, self._recompute_fewer(base))
                case BalancedShares(base):
                    candidate = self._balance(base)
        self._tell(candidate)
        return candidate

    def estimate(self, pipeline: Pipeline | None) -> RelaxedEstimate | None:
        with self._request.progress.at(describe_pipeline(pipeline)):
            try:
                return self._search.estimate(self._asked(pipeline))
            except TfparError:  # a layout's search says it
                return None

    def bound(self, pipeline: Pipeline | None) -> Cost | None:
        return compute_bound(self._search.problem(self._request), self._request, pipeline)

    def is_good_enough(self, candidate: SolvedCandidate) -> bool:
        return self._enough is not None and self._enough(candidate, self._request)

    def machine_types(self, pipeline: Pipeline | None, ranks: Order) -> Sequence[Cluster | None]:
        if not _has_stages(pipeline):
            return [None]
        types = search_machine_types(self._asked(pipeline).machine_types(self._ranks(ranks)))
        return types[:1] if self._search.part else types

    def rank_orders(
        self, pipeline: Pipeline | None, given: SolvedCandidate | None
    ) -> Sequence[Order]:
        request = self._asked(pipeline)
        by_hand = any(isinstance(c, PutInStage) for c in request.constraints)
        is_open = _has_stages(pipeline) and request.ranks is None and not by_hand
        is_open = is_open and len({*request.sizes}) == 1
        if pipeline is None or not is_open or self._search.part:
            return []
        slots = ActorSlots(request.cluster, request.mesh.size, request.num_actors)
        return fastest_orders(slots, self._workload(pipeline, given), given is not None)

    def unlike_groups(self, given: SolvedCandidate) -> Sequence[Groups]:
        request = self._request
        if self._search.part or not request.allows_unlike_stages:
            return []
        machines = request.cluster.part(range(request.mesh.size))
        actors = max(2, given.num_actors)
        pipeline = Pipeline(actors, max(FILLED * actors, given.plan.microbatches))
        workload, size = self._workload(pipeline, given), request.mesh.size / given.num_actors
        limit = given.seconds / (1 + UNCERTAINTY)
        found = fastest_groups(machines, size, workload, given.groups)
        return [g for g in found if workload.estimate_groups(machines, g, size) < limit]

    def _lay_out(self, proposal: NewLayout) -> SolvedCandidate | None:
        """The planner's layout for a pipeline, as it fits."""
        pipeline, machines = proposal.pipeline, proposal.machines
        request = self._asked(pipeline, proposal.meshes)
        with request.progress.at("", request.budget.seconds):
            problem = self._search.problem(request)
            if not _has_stages(pipeline):
                asked = problem
                if pipeline is None:
                    asked = problem.with_incumbent_callback(self._tell_of(problem))
                layout = self._search.find_layout(asked, request, self._layouts)
                return SolvedCandidate.of(layout, problem)
            problem = problem if machines is None else problem.on(machines)
            ranks = self._ranks(proposal.ranks)
            fit = StagedFit(self._staged(request, problem, ranks))
            with fit.interruptible():
                layout = self._search.find_layout(problem, request, self._layouts)
                where = pipeline, proposal.ranks, proposal.meshes
                there = self._evaluated.setdefault(where, set())
                if execution_key(layout) in there:
                    return None  # in stages it is what was found for other machines
                plan = fit.run(layout)
                there.add(execution_key(layout))
            return SolvedCandidate.of(plan, problem)

    def _staged(self, request: PlanRequest, problem: Problem, ranks: Order) -> StageStep:
        """The step in the stages of a request."""
        may_recompute = self._request.pipeline is None and request.recompute is not False
        return _StagedStep(self._search, request, problem, ranks, self._layouts, may_recompute)

    def _recompute_fewer(self, base: SolvedCandidate) -> Plan | None:
        """The candidate's layout with no stages recomputed but those that have to be."""
        assert base.plan.stages is not None, "a plan with stages"
        ranks = base.plan.stages.ranks

        def step_of(pipeline: Pipeline) -> StageStep:
            return self._staged(self._asked(pipeline), base.problem, ranks)

        try:
            plan = recompute_fewer(base.plan, step_of)
        except (PlanError, ScheduleError):
            return None
        return plan and price_best_schedule(plan, base.problem, self._request.cluster)

    def _cut_again(self, base: SolvedCandidate, pipeline: Pipeline) -> Plan | None:
        """The candidate's layout in other stages on the same actors, in their best schedule."""
        if self._request.min_stages > 1:  # constraints number stages as they are
            return None
        assert base.plan.stages is not None, "a plan with stages"
        limits = self._request.limits
        if pipeline.tolerance is not None:
            if limits.tolerance is not None:  # it is given
                return None
            limits = dataclasses.replace(limits, tolerance=pipeline.tolerance)
        layout = dataclasses.replace(base.plan, shares={}, stages=None)
        try:
            request = dataclasses.replace(self._asked(pipeline), limits=limits)
            ranks = base.plan.stages.ranks
            cut = self._search.assign_stages(layout, request, self._layouts, ranks)
            return price_best_schedule(cut, base.problem, self._request.cluster)
        except (PlanError, ScheduleError):
            return None

    def _in_shares_of(self, base: SolvedCandidate, plan: Plan | None) -> SolvedCandidate | None:
        """A plan that was priced in equal shares, in those that suit it if they paid for `base`."""
        if plan is None:
            return None
        candidate = SolvedCandidate.of(plan, base.problem)
        return self._balance(candidate) if has_unequal_shares(base.plan) else candidate

    def _balance(self, base: SolvedCandidate) -> SolvedCandidate:
        if self._search.part:
            return base
        plan = balance_shares(
            base.plan, base.problem, self._request.cluster, self._search.batch_size
        )
        return SolvedCandidate.of(plan, base.problem)

    def _workload(self, pipeline: Pipeline, given: SolvedCandidate | None) -> PlacementWorkload:
        """Return the workload by which the machines of actors are chosen."""
        request = self._asked(pipeline)
        problem = self._search.problem(request)
        taken: dict[Device, float] = {}

        def seconds_on(machines: Cluster) -> float:
            if machines.device not in taken:
                forward, backward, _ = cost_on_one_device(problem, machines).compute_s
                taken[machines.device] = forward + backward
            return taken[machines.device]

        stages = None if given is None else given.plan.stages
        cost = None if stages is None else stages.cost
        sent = 0.0 if cost is None else sum(share.sent_bytes for share in cost.stages)
        weights = sum(v.num_bytes for v in problem.step.variables if v.trainable)
        links = max(1, 2 * (pipeline.num_stages - 1))
        return PlacementWorkload(seconds_on, weights, sent / links, pipeline.num_microbatches)

    def _asked(
        self, pipeline: Pipeline | None, meshes: tuple[LogicalMesh, ...] = ()
    ) -> PlanRequest:
        """The request for a pipeline."""
        if self._request.pipeline is not None:
            assert pipeline == self._request.pipeline, "the pipeline that is given"
            return self._request
        return self._request.with_pipeline(pipeline, meshes)

    def _ranks(self, ranks: Order) -> Order:
        return ranks or self._request.ranks or ()

    def _tell_of(self, problem: Problem) -> IncumbentCallback:
        def tell(make: MakePlan, cost: Cost | None) -> None:
            if cost is not None and not problem.excess(cost):
                self._request.progress.found(cost.seconds)

        return tell

    def _tell(self, candidate: SolvedCandidate | None) -> None:
        """Report the seconds of a candidate that fits."""
        if self._enough is None or candidate is None or candidate.plan.cost is None:
            return
        limit = self._request.cluster.device.memory_bytes
        if candidate.plan.cost.memory_bytes <= limit:
            self._request.progress.found(candidate.plan.cost.seconds)

    def _label(self, proposal: Proposal) -> str:
        if self._enough is None:
            return ""
        match proposal:
            case NewLayout(pipeline):
                return describe_pipeline(pipeline)
            case OtherMicrobatches(_, pipeline) | OtherStages(_, pipeline):
                return describe_pipeline(pipeline)
            case BestSchedule(base):
                return f"schedules of {describe_pipeline(base.plan.pipeline)}"
            case BalancedShares() | FewerRecomputed():
                return describe_pipeline(proposal.base.plan.pipeline)


@dataclasses.dataclass(frozen=True)
class _StagedStep:
    """A step whose layouts are given the stages of a pipeline; see `memory.stages.StageStep`."""

    search: StepSearch
    request: PlanRequest
    problem: Problem
    ranks: Order
    layouts: Layouts
    may_recompute: bool

    def find(self, problem: Problem) -> Plan:
        return self.search.find_layout(problem, self.request, self.layouts)

    def assign(
        self, layout: Plan, before: Plan | None = None, deadline: Deadline | None = None
    ) -> Plan:
        return self.search.assign_stages(
            layout, self.request, self.layouts, self.ranks, before, deadline
        )

    def price(self, plan: Plan) -> Plan | None:
        if self.search.part:
            return None
        assert self.request.pipeline is not None, "a request for stages"
        price = price_best_schedule if self.request.pipeline.picks_schedule else price_plan
        return price(plan, self.problem, self.request.cluster)


def _has_stages(pipeline: Pipeline | None) -> bool:
    return pipeline is not None and pipeline.num_stages > 1
