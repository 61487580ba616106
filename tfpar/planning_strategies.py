"""From a captured step to its plan by a search of strategies: annealing, Alpa's two levels, others.

    proposals = propose(search, request, batch_size, "anneal")

The planner finds a plan for each layout that the ranks of a stage can have, the layers of the step
are priced under it (`search.three_d.from_step`), and the search ranks strategies of stages, layout,
placement and microbatches by that table. The few best are planned and priced in full, as any
pipeline is, beside the best plan without stages; the fastest of these is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tfpar.cluster.description import Cluster, Device
from tfpar.constraints.stages import check_stages, least_stages
from tfpar.pipeline import AUTO, Pipeline
from tfpar.planning import Request, StepSearch
from tfpar.planning_rivals import Enough, with_idle_times, with_turning_point
from tfpar.plans import Plan, Rival
from tfpar.search.meshes import LogicalMesh
from tfpar.search.objective import UNCERTAINTY
from tfpar.search.problem import Problem
from tfpar.search.so_far import SearchInterrupted
from tfpar.search.stages.choice import MOST, name_of_plan, numbers_of_stages, reason_of
from tfpar.search.three_d.from_step import LaidOut, step_table
from tfpar.search.three_d.model import Model
from tfpar.search.three_d.searches import Ranked, best_of_kinds, ranked_strategies
from tfpar.search.three_d.strategy import Strategy
from tfpar.search.within_memory import fastest_plan
from tfpar.spec import MemoryLimitError, PlanError, ScheduleError, SpecError, TfparError

FINALISTS = 4
"""How many strategies are planned and priced in full."""

Degrees = tuple[int, int]
"""Copies of a stage, and ranks that its weights may be split over."""


class Proposal(NamedTuple):
    """A pipeline that is worth planning in full.

    Attributes:
        pipeline: None: no stages, one microbatch.
        ranks: of the job, one set of them after the other; none: all in their order.
        meshes: the logical meshes of a stage to choose from; none: all.
        seconds: that a step takes by the table; infinite if that was not asked.
    """

    pipeline: Pipeline | None
    ranks: tuple[int, ...] = ()
    meshes: tuple[LogicalMesh, ...] = ()
    seconds: float = math.inf

    def request(self, request: Request) -> Request:
        """What is asked of a planner."""
        actors = 1 if self.pipeline is None else self.pipeline.order.num_actors
        return dataclasses.replace(
            request,
            mesh=request.mesh.divided(actors),
            pipeline=self.pipeline,
            ranks=self.ranks if actors > 1 else None,
            meshes=self.meshes,
        )


def search_strategies(
    search: StepSearch,
    request: Request,
    batch_size: int | None,
    *,
    asked: Pipeline,
    enough: Enough,
) -> tuple[Plan, Problem]:
    """The best plan of those that a search of strategies proposes, and of none with stages.

    Args:
        search: finds the plan for what is requested.
        request: has all ranks and no pipeline.
        batch_size: of the step.
        asked: says which search.
        enough: see `search.stages.choice.Ways`; it decides what would make the runner-up win.

    Raises:
        As `planning.StepSearch`.
    """
    check_stages(request.constraints, request.mesh.size)
    search.check_room(request)
    found = _Found(search, request)
    try:
        for proposal in propose(search, request, batch_size, asked):
            found.plan(proposal)
        plan = found.chosen()
        with request.report.at("what would have to change for the runner-up"):
            plan = with_idle_times(plan, found.problems, request.cluster, batch_size)
            if _has_other_stages(plan):
                plan = with_turning_point(plan, found.problems, request, batch_size, enough)
    except KeyboardInterrupt:
        if not found.plans:
            raise
        so_far = functools.partial(dataclasses.replace, found.chosen(), cut_short=True)
        raise SearchInterrupted(so_far) from None
    return plan, found.problems[_actors(plan)]


def propose(
    search: StepSearch, request: Request, batch_size: int | None, asked: Pipeline
) -> Iterator[Proposal]:
    """No stages, and then the strategies that a search ranks first; arguments as of
    `search_strategies`.

    Raises:
        PlanError: the size of the batch is not known.
    """
    if batch_size is None:
        raise PlanError(
            f"search={asked.search!r} cuts a batch whose size is known beforehand, and this one's "
            f"is not. Give a fixed batch size, or leave out search=."
        )
    least = least_stages(request.constraints)
    if least == 1:
        yield Proposal(None)
    plans = plans_of_layouts(search, request)
    if not plans:
        return
    cluster = _with_names(request.cluster.part(range(request.mesh.size)))
    size = request.mesh.size
    most = {degrees: MOST * size // math.prod(degrees) for degrees in plans}
    table = step_table(plans, batch_size, most, cluster, shards=not cluster.one_memory)
    model = Model(table, cluster, batch_size, most_virtual=8 if least == 1 else 1)
    with request.report.at(f"{asked.search} search of strategies", request.budget.seconds):
        try:
            ranked = ranked_strategies(
                model,
                asked.search,
                seed=asked.seed,
                seconds=request.budget.seconds or math.inf,
                progress=request.report.priced,
            )
        except PlanError:  # nothing fits, or comes out even: no stages are all there is
            return
    finalists = (one for one in best_of_kinds(ranked) if not _is_plain(one.strategy, batch_size))
    for one in itertools.islice(finalists, FINALISTS):
        yield _proposal(one, plans, batch_size)


def plans_of_layouts(search: StepSearch, request: Request) -> dict[Degrees, LaidOut]:
    """The plan that is fastest, whatever it stores, of each layout that the ranks of a stage can
    have: of the logical meshes that split the batch in as many parts."""
    found: dict[Degrees, LaidOut] = {}
    for actors in numbers_of_stages(request.mesh, least_stages(request.constraints)):
        proposal = Proposal(None if actors == 1 else Pipeline(actors, 1))
        problem = search.problem(proposal.request(request))
        by_parts: dict[int, list[LogicalMesh]] = {}
        for mesh in problem.meshes:
            by_parts.setdefault(mesh.batch_parts, []).append(mesh)
        for parts, meshes in by_parts.items():
            own = problem.asked_as(dataclasses.replace(problem, meshes=meshes))
            with request.report.at(f"plans for {meshes[0].mesh.size} ranks of a stage"):
                try:
                    plan = fastest_plan(own, search.planner)
                except PlanError:  # none satisfies the constraints
                    continue
            found[parts, meshes[0].mesh.size // parts] = LaidOut(plan, own)
    return found


def _proposal(ranked: Ranked, plans: Mapping[Degrees, LaidOut], batch_size: int) -> Proposal:
    strategy = ranked.strategy
    microbatches = batch_size // (strategy.data * strategy.microbatch)
    meshes = tuple(plans[strategy.data, strategy.tensor].problem.meshes)
    if strategy.actors == 1:
        return Proposal(Pipeline(microbatches=microbatches), (), meshes, ranked.seconds)
    pipeline = Pipeline(
        strategy.actors,
        microbatches,
        AUTO,
        strategy.virtual if strategy.virtual > 1 else None,
        recompute=strategy.memory.recompute,
    )
    stages = (sorted(strategy.stage(actor)) for actor in range(strategy.actors))
    ranks = tuple(itertools.chain.from_iterable(stages))
    in_order = ranks == tuple(range(strategy.size))
    return Proposal(pipeline, () if in_order else ranks, meshes, ranked.seconds)


def _is_plain(strategy: Strategy, batch_size: int) -> bool:
    """Whether it has neither stages nor microbatches."""
    return strategy.actors == 1 and strategy.data * strategy.microbatch == batch_size


def _with_names(cluster: Cluster) -> Cluster:
    """The cluster with a name of its own for each kind of devices."""
    names: dict[Device, str] = {}
    for node in cluster.nodes:
        names.setdefault(node.device, str(len(names)))
    nodes = tuple(
        dataclasses.replace(node, device=dataclasses.replace(node.device, name=names[node.device]))
        for node in cluster.nodes
    )
    return dataclasses.replace(cluster, nodes=nodes)


class _Found:
    """The proposals that were planned, and what came of them."""

    def __init__(self, search: StepSearch, request: Request) -> None:
        self.search, self.request = search, request
        self.plans: list[Plan] = []
        self.problems: dict[int, Problem] = {}
        self.lost: list[Rival] = []
        self.errors: list[TfparError] = []

    def plan(self, proposal: Proposal) -> None:
        """Plan and price it.

        Raises:
            PlanError: the planner does not price its plans.
        """
        with self.request.report.at(_name(proposal)):
            try:
                plan, problem = self.search(proposal.request(self.request))
            except (PlanError, ScheduleError, SpecError) as error:
                self.errors.append(error)
                self.lost.append(Rival(_name(proposal), None, reason_of(error)))
                return
        if plan.cost is None:
            raise PlanError(
                f"Planner {plan.planner!r} says nothing of what its plans cost, by which pipelines "
                f"are compared. Give a tap.Pipeline with stages and microbatches instead."
            )
        self.plans.append(plan)
        self.problems.setdefault(_actors(plan), problem)
        self.request.report.found(min(map(_seconds, self.plans)))

    def chosen(self) -> Plan:
        """The fastest, with what it was preferred to: without stages, if predictions cannot tell
        that the fastest is faster.

        Raises:
            TfparError: none was found; that of which least is missing.
        """
        if not self.plans:
            raise min(self.errors, key=_needed)
        ranked = sorted(self.plans, key=_seconds)
        near = _seconds(ranked[0]) * (1 + UNCERTAINTY)
        without = (p for p in ranked if p.stages is None and _seconds(p) <= near)
        best = next(without, ranked[0])
        rivals = [
            Rival(name_of_plan(plan), plan.cost, plan=plan) for plan in ranked if plan is not best
        ]
        return dataclasses.replace(best, rivals=(*rivals, *self.lost))


def _name(proposal: Proposal) -> str:
    """`2 stages, 8 microbatches, each data=4 x model=2`."""
    pipeline = proposal.pipeline
    if pipeline is None:
        return "no stages"
    stages, count = pipeline.order.num_stages, pipeline.order.num_microbatches
    again = ", recomputing" if pipeline.recompute else ""
    each = f", each {proposal.meshes[0].mesh}" if proposal.meshes else ""
    name = f"{stages} stages" if stages > 1 else "no stages"
    return f"{name}, {count} microbatches{again}{each}"


def _has_other_stages(plan: Plan) -> bool:
    """Whether the first rival that was planned is of another number of sets of ranks."""
    rival = next((rival.plan for rival in plan.rivals if rival.plan is not None), None)
    return rival is not None and _actors(rival) != _actors(plan)


def _actors(plan: Plan) -> int:
    return plan.num_ranks // plan.mesh.size


def _seconds(plan: Plan) -> float:
    assert plan.cost is not None, "a plan that was searched for"
    return plan.cost.seconds


def _needed(error: TfparError) -> float:
    return error.needed_bytes if isinstance(error, MemoryLimitError) else math.inf
