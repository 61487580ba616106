"""The outer search over strategies: annealing, Alpa's two levels, others, by a table of layers.

The planner finds a plan for each layout that the ranks of a stage can have, the layers of the step
are priced under it (`planning.inter_op.three_d.from_step`), and a search ranks strategies of
stages, layout, placement and microbatches by that table. The few best are planned and priced in
full, as any pipeline is, beside the best plan without stages and, where machines differ, stages on
unlike numbers of ranks; the fastest of these is taken.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfpar.cluster.description import Cluster, Device
from tfpar.constraints.stages import least_stages
from tfpar.cost.cost import Cost
from tfpar.pipeline import AUTO, Pipeline
from tfpar.pipeline.pipeline import groups_of
from tfpar.planning.candidates import (
    BestSchedule,
    Order,
    OtherMicrobatches,
    Proposal,
    SolvedCandidate,
    describe_pipeline,
)
from tfpar.planning.drive import SearchResult
from tfpar.planning.folding.folded_model import folded_model
from tfpar.planning.inter_op.choosing import choose, needed_bytes, order_of, reason_of
from tfpar.planning.inter_op.enumerate_pipelines import (
    is_even,
    numbers_of_stages,
    unlike_pipelines,
)
from tfpar.planning.inter_op.pipeline_options import MOST, PipelineOptions
from tfpar.planning.inter_op.placing import Placing, Proposing
from tfpar.planning.inter_op.three_d.alpa import AlpaPlan, submesh_sizes
from tfpar.planning.inter_op.three_d.baselines import alpa
from tfpar.planning.inter_op.three_d.cost_table import LayoutDegrees
from tfpar.planning.inter_op.three_d.from_step import LaidOut, step_table
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.searches import (
    Ranked,
    best_of_kinds,
    ranked_strategies,
    simulated,
)
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.planning.inter_op.three_d.strategy_cost import strategy_cost
from tfpar.planning.intra_op.weights import expert_counts
from tfpar.planning.memory.relayout import fastest_plan
from tfpar.planning.meshes import LogicalMesh, expert_meshes, with_expert_meshes
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepEvaluator, StepSearch
from tfpar.plans import Candidate, PipelinePlan
from tfpar.plans.equivalence import execution_key
from tfpar.spec import PlanError, ScheduleError, SpecError, TfparError
from tfpar.spec.mesh import divisors
from tfpar.spec.quantities import format_seconds

FINALISTS = 3
"""How many strategies are planned and priced in full, whatever their number of stages; and the best
of each other number, as schedules are picked later, and gain more the more stages there are."""

MAX_TABLE_RATIO = 2.0
"""How many times as long as the best plan so far a step may take by the table for a strategy to be
planned."""

MAX_PLAN_RATIO = 1.5
"""How many times as long as in the best plan so far a step may take in one for other numbers of
microbatches to be looked at."""

FEW_LAYERS = 2
"""Layers for each stage below which the table says little of stages."""

OF_ALL = "anneal", "exhaustive", "random"
"""Searches of all strategies that there are. The others choose as Alpa and Megatron-LM do."""

MOST_SUBMESHES = 12
"""Sizes of submeshes beyond which layouts are planned for those alone that divide all ranks."""


class StrategyPipeline(NamedTuple):
    """A pipeline that a strategy runs in, to be planned in full.

    Attributes:
        pipeline: None: no stages, one microbatch.
        ranks: of its actors; none: all in their order.
        meshes: the logical meshes of a stage to choose from; none: all.
        seconds: of a step by the table; infinite if that was not asked, or says little.
        cost: the same by part; None if that was not asked.
    """

    pipeline: Pipeline | None
    ranks: Order = ()
    meshes: tuple[LogicalMesh, ...] = ()
    seconds: float = math.inf
    cost: Cost | None = None


class StrategySearch(Placing):
    """The outer search that plans the strategies that a search by a table ranks first, and a plan
    without stages; see `drive.PipelineSearch`.

    Args:
        search: of the step.
        request: has all ranks and no pipeline.
        asked: says which search.
    """

    def __init__(
        self, evaluator: StepEvaluator, search: StepSearch, request: PlanRequest, asked: Pipeline
    ) -> None:
        super().__init__(evaluator)
        self._search, self._request, self._asked = search, request, asked
        self._found: list[SolvedCandidate] = []
        self._lost: list[Candidate] = []
        self._errors: list[TfparError] = []

    def proposals(self) -> Iterator[Proposal]:
        if self._search.batch_size is None:
            raise PlanError(
                f"search={self._asked.search!r} cuts a batch whose size is known beforehand, and "
                f"this one's is not. Give a fixed batch size, or leave out search=."
            )
        for one in self._strategies():
            yield from self._plan(one)
        if not self._found:
            raise min(self._errors, key=needed_bytes)
        if self._asked.search in OF_ALL:
            yield from self._plan_unlike()

    def _plan_unlike(self) -> Iterator[Proposal]:
        """Plan stages on unlike numbers of ranks, where machines differ and that may be faster: of
        those on the same ranks, the first that fits."""
        best = min(self._found, key=order_of)
        options = PipelineOptions(divisors(self._search.batch_size or 1))
        for tries in unlike_pipelines(self.evaluator, best, options):
            for pipeline in tries:
                known = len(self._found)
                pipeline = dataclasses.replace(pipeline, schedule=AUTO)
                yield from self._plan(StrategyPipeline(pipeline, pipeline.rank_order or ()))
                if len(self._found) > known:
                    break

    def _strategies(self) -> Iterator[StrategyPipeline]:
        """Yield all of them, until there are none, for whichever reason."""
        try:
            yield from propose(self._search, self._request, self._asked)
        except PlanError as error:
            self._lose("strategies with stages", error)

    def _lose(self, name: str, error: TfparError, cost: Cost | None = None) -> None:
        self._errors.append(error)
        self._lost.append(_lost(name, cost, reason_of(error)))

    def _plan(self, one: StrategyPipeline) -> Iterator[Proposal]:
        """Plan and price a strategy, unless the table says that it is far from the best so far.

        Raises:
            PlanError: the planner does not price its plans.
        """
        best_s = min((found.seconds for found in self._found), default=math.inf)
        if MAX_TABLE_RATIO * best_s < one.seconds < math.inf:
            why = f"not planned: by its layers a step takes {format_seconds(one.seconds)}"
            self._lost.append(_lost(_name(one), one.cost, why))
            return
        try:
            candidate = yield from self.place(one.pipeline, one.ranks, one.meshes)
        except (PlanError, ScheduleError, SpecError) as error:
            self._lose(_name(one), error, one.cost)
            return
        if candidate.plan.cost is None:
            raise PlanError(
                f"Planner {candidate.plan.planner!r} says nothing of what its plans cost, by which "
                f"pipelines are compared. Give a tap.Pipeline with stages and microbatches instead."
            )
        if candidate.plan.stages is not None and candidate.seconds <= MAX_PLAN_RATIO * best_s:
            candidate = yield from self._in_best_microbatches(candidate)
        key = execution_key(candidate.plan)
        if all(execution_key(other.plan) != key for other in self._found):
            self._found.append(candidate)  # layouts may differ that the planner makes the same of

    def _in_best_microbatches(self, candidate: SolvedCandidate) -> Proposing:
        """Try a candidate with stages in twice or half as many microbatches, as long as that is
        faster.

        The table says what microbatches take in 1F1B, and not what they do in the schedule that
        suits them best.
        """
        best = candidate
        for factor in (2, 0.5):
            count = candidate.plan.microbatches * factor
            while count > 1 and count == int(count):
                other = yield from self._in_microbatches(best, int(count))
                if other is None or other.seconds >= best.seconds:
                    break
                best, count = other, count * factor
            if best is not candidate:
                break
        return best

    def _in_microbatches(
        self, candidate: SolvedCandidate, microbatches: int
    ) -> Generator[Proposal, None, SolvedCandidate | None]:
        """Try a candidate with stages in so many microbatches, in the schedule that suits these
        best; None if they do not come out even, or it does not run or fit so."""
        plan = candidate.plan
        assert plan.stages is not None, "a plan with stages"
        if not is_even(plan, self._search.batch_size or 1, microbatches):
            return None
        asked = OtherMicrobatches(candidate, in_other_microbatches(plan.stages, microbatches))
        try:
            found = yield from self.propose(asked)
            if found is not None:
                found = yield from self.propose(BestSchedule(found))
        except (PlanError, ScheduleError):
            return None
        limit = self._request.cluster.device.memory_bytes
        return found if found is not None and found.plan.fits(limit) else None

    def result(self) -> SearchResult | None:
        """Return the fastest, without stages if predictions cannot tell that the fastest is
        faster."""
        if not self._found:
            return None if self.placed is None else SearchResult(self.placed)
        return choose(self._found, self._lost)


def propose(
    search: StepSearch, request: PlanRequest, asked: Pipeline
) -> Iterator[StrategyPipeline]:
    """No stages, and then the strategies that a search ranks first; arguments as of
    `StrategySearch`.

    Raises:
        PlanError: no strategy comes out even; a MemoryLimitError if none fits by the table.
    """
    batch_size = search.batch_size
    assert batch_size is not None, "a batch that can be cut"
    least = least_stages(request.constraints)
    if least == 1:
        yield StrategyPipeline(None)
    is_alpa, size = asked.search == "alpa", request.mesh.size
    cluster = _with_names(request.cluster.part(range(size)))
    sizes = sizes_of_stages(request)
    if is_alpa and request.allows_unlike_stages:
        sizes = [*dict.fromkeys([*sizes, *_submeshes(cluster)])]
    plans = plans_of_layouts(search, request, sizes)
    if not plans:
        return
    most = {degrees: MOST * size // degrees.size for degrees in plans}
    table = step_table(plans, batch_size, most, cluster, shards=not cluster.one_memory)
    model = StrategyProblem(table, cluster, batch_size, most_virtual=8 if least == 1 else 1)
    with request.progress.at(f"{asked.search} search of strategies", request.budget.seconds):
        if is_alpa:
            found = alpa(model, equal=not request.allows_unlike_stages)
            strategy = found.strategy()
            if strategy is None:
                yield _unlike_pipeline(found, plans, batch_size)
                return
            ranked = simulated(model, [strategy])
        else:
            ranked = ranked_strategies(
                model,
                asked.search,
                seed=asked.seed,
                seconds=request.budget.seconds or math.inf,
                progress=request.progress.priced,
            )
    for one in _finalists(ranked, batch_size):
        planned = strategy_pipeline(one, plans, batch_size)
        yield planned._replace(cost=strategy_cost(model, one.strategy))


def _finalists(ranked: Sequence[Ranked], batch_size: int) -> list[Ranked]:
    """Return those that are worth planning, the fastest first."""
    ranked = [one for one in ranked if not _is_whole(one.strategy, batch_size)]
    kinds = [*best_of_kinds(ranked)]
    of_each: dict[int, Ranked] = {}
    for one in kinds:
        of_each.setdefault(one.strategy.actors, one)
    chosen = [*kinds[:FINALISTS], *of_each.values()]
    return [one for one in kinds if one in chosen]


def sizes_of_stages(request: PlanRequest) -> list[int]:
    """List the numbers of ranks that equal stages can have."""
    size = request.mesh.size
    return [size // n for n in numbers_of_stages(request.mesh, least_stages(request.constraints))]


def _submeshes(cluster: Cluster) -> list[int]:
    """The sizes of submeshes for which layouts are planned."""
    sizes = submesh_sizes(cluster)
    return sizes if len(sizes) <= MOST_SUBMESHES else [n for n in sizes if cluster.size % n == 0]


def plans_of_layouts(
    search: StepSearch, request: PlanRequest, sizes: Sequence[int]
) -> dict[LayoutDegrees, LaidOut]:
    """Find the plan that is fastest, whatever it stores, of each layout that the ranks of a stage
    can have: of the logical meshes that split the batch in as many parts, and experts over as many
    ranks.

    Args:
        sizes: the numbers of ranks of a stage.
    """
    found: dict[LayoutDegrees, LaidOut] = {}
    for size in sizes:
        problem = search.problem(request.with_pipeline(_beside_others(size, request.mesh.size)))
        counts = expert_counts(folded_model(problem, 2))
        with_experts = [mesh for n in counts for mesh in expert_meshes(problem.meshes[0].mesh, n)]
        of_degrees: dict[LayoutDegrees, list[LogicalMesh]] = {}
        for mesh in with_expert_meshes(problem.meshes, [*dict.fromkeys(with_experts)]):
            degrees = _degrees(mesh, counts)
            if degrees.experts > 1:
                mesh = dataclasses.replace(mesh, expert_axes=mesh.shared_axes)
            of_degrees.setdefault(degrees, []).append(mesh)
        for degrees, meshes in of_degrees.items():
            own = problem.with_meshes(meshes)
            with request.progress.at(f"plans for {size} ranks of a stage"):
                try:
                    plan = fastest_plan(own, search.planner)
                except PlanError:  # none satisfies the constraints
                    continue
            found[degrees] = LaidOut(plan, own)
    return found


def _degrees(logical: LogicalMesh, experts: Collection[int]) -> LayoutDegrees:
    """The degrees of layouts on a mesh.

    Args:
        experts: the numbers of experts that layers have.
    """
    parts, over = logical.batch_parts, logical.mesh.group_size(logical.shared_axes)
    spread = over if any(count % over == 0 for count in experts) else 1
    return LayoutDegrees(parts, logical.mesh.size // parts, spread)


def _beside_others(size: int, ranks: int) -> Pipeline | None:
    """Stages of so many ranks, and one of those that are left."""
    if size == ranks:
        return None
    groups = [tuple(range(ranks)[start : start + size]) for start in range(0, ranks, size)]
    return Pipeline(ranks=groups, microbatches=1)


def _unlike_pipeline(
    plan: AlpaPlan, plans: Mapping[LayoutDegrees, LaidOut], batch_size: int
) -> StrategyPipeline:
    """Stages on as many ranks as Alpa gives each, those of one size in one layout."""
    pipeline = Pipeline(
        ranks=groups_of([stage.size for stage in plan.stages]),
        microbatches=batch_size // plan.microbatch,
        schedule=AUTO,
    )
    shapes = dict.fromkeys(stage.degrees for stage in plan.stages)
    meshes = tuple(mesh for shape in shapes for mesh in plans[shape].problem.meshes)
    return StrategyPipeline(pipeline, pipeline.rank_order or (), meshes)


def strategy_pipeline(
    ranked: Ranked, plans: Mapping[LayoutDegrees, LaidOut], batch_size: int
) -> StrategyPipeline:
    """The pipeline that a strategy runs in."""
    strategy = ranked.strategy
    microbatches = batch_size // (strategy.data * strategy.microbatch)
    meshes = tuple(plans[strategy.layout(0).degrees].problem.meshes)
    if strategy.actors == 1:
        return StrategyPipeline(Pipeline(microbatches=microbatches), (), meshes, ranked.seconds)
    pipeline = Pipeline(
        strategy.actors,
        microbatches,
        AUTO,
        strategy.virtual if strategy.virtual > 1 else None,
        recompute=strategy.recompute,
    )
    # Plans may cut layers, too, which counts for much where a stage has hardly more than one.
    is_coarse = sum(strategy.counts) < FEW_LAYERS * strategy.stages
    seconds = math.inf if is_coarse else ranked.seconds
    stages = (sorted(strategy.stage(actor)) for actor in range(strategy.actors))
    ranks = tuple(itertools.chain.from_iterable(stages))
    in_order = ranks == tuple(range(strategy.size))
    return StrategyPipeline(pipeline, () if in_order else ranks, meshes, seconds)


def in_other_microbatches(stages: PipelinePlan, microbatches: int) -> Pipeline:
    """Return a pipeline with the same stages, recomputed as they are."""
    each = stages.num_stages // stages.num_actors
    virtual = each if each > 1 else None
    return Pipeline(stages.num_actors, microbatches, AUTO, virtual, recompute=stages.recompute)


def _is_whole(strategy: Strategy3D, batch_size: int) -> bool:
    """Whether it cuts no batch: it has no stages, or stages that would work one after the other."""
    return strategy.data * strategy.microbatch == batch_size


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


def _lost(name: str, cost: Cost | None, why: str) -> Candidate:
    """A strategy without a plan, with what it costs by the table."""
    return dataclasses.replace(Candidate.priced(name, cost), reason=why)


def _name(one: StrategyPipeline) -> str:
    """`2 stages, 8 microbatches, each data=4 x model=2`, or `... on 1 + 2 ranks`."""
    groups = None if one.pipeline is None else one.pipeline.ranks
    if groups is not None:
        return (
            f"{describe_pipeline(one.pipeline)}, on {' + '.join(str(len(g)) for g in groups)} ranks"
        )
    each = f", each {one.meshes[0].mesh}" if one.meshes else ""
    return describe_pipeline(one.pipeline) + each
