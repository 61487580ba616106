"""From a captured step to its plan: the problem is stated, and a planner or a cache answers."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence

from tfpar.cluster.description import Cluster
from tfpar.compile.passes import Observer, unobserved
from tfpar.compile.simplify import simplify_step
from tfpar.constraints import (
    Constraint,
    PutInStage,
    batch_axes,
    resolve_outputs,
    resolve_variables,
)
from tfpar.cost.cost import Cost
from tfpar.cost.evaluate import evaluate
from tfpar.ir.collection import collection_paused
from tfpar.ir.fingerprint import fingerprint
from tfpar.ir.graph import Graph, Tensor, Variable
from tfpar.ir.planning_graph import planning_graph
from tfpar.ir.roles import Roles
from tfpar.ir.step import StepGraph
from tfpar.pipeline import Pipeline
from tfpar.plans import Plan
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import PartitionedGraph
from tfpar.propagation.prepared import prepare
from tfpar.report.memory import memory_error
from tfpar.report.progress import searching
from tfpar.search.batch import with_batch_split
from tfpar.search.cache import PlanCache, problem_digest
from tfpar.search.chunks import in_chunks
from tfpar.search.conflicts import Relaxed, conflict_error, find_conflict
from tfpar.search.deadline import Deadline
from tfpar.search.meshes import given_mesh, logical_meshes
from tfpar.search.microbatches import in_microbatches
from tfpar.search.model.folded_model import FoldedModel
from tfpar.search.objective import Budget
from tfpar.search.problem import Fixed, Planner, Problem, Progress, step_anchors
from tfpar.search.recompute import recomputed_problem, solve_with_recompute
from tfpar.search.so_far import SearchInterrupted, SoFar
from tfpar.search.stages.fitting import find_in_stages
from tfpar.search.stages.planned import in_stages
from tfpar.search.stages.priced import priced_plan, scheduled_plan
from tfpar.spec import Mesh, PlanError, Spec, TimeLimitError

logger = logging.getLogger("tfpar")

Interrupted = MutableMapping[str, SearchInterrupted]
"""Searches that Ctrl-C ended, by the digest of their problem."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks of a planner.

    Attributes:
        mesh: the physical shape of the ranks; of a pipeline, of those of one stage.
        cluster: the machines of all ranks.
        base: a plan that fixed the logical mesh for other models of the same session.
        compression: the dtype in which gradients travel; None: their own.
        recompute: see `search.problem.Problem`.
        pipeline: the stages and microbatches of a training step; None: one of each.
        budget: what each search may take.
        owners: the stages that variables of the pipeline lie in already, by name.
    """

    mesh: Mesh
    cluster: Cluster
    constraints: tuple[Constraint, ...] = ()
    base: Plan | None = None
    compression: str | None = None
    recompute: bool | tuple[str, ...] | None = None
    pipeline: Pipeline | None = None
    budget: Budget = Budget()
    owners: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def machines(self) -> Cluster:
        """Those on which plans are priced: of all ranks, or of the first set of a pipeline.

        Raises:
            TfparError: more ranks than devices.
        """
        actors = 1 if self.pipeline is None else self.pipeline.order.num_actors
        if actors == 1:
            self.cluster.check(self.mesh)
            return self.cluster
        self.cluster.check(Mesh.of(actors * self.mesh.size))
        part = self.cluster.part(range(self.mesh.size))
        # A search prices the whole model on these ranks, but they store one stage of it, about this
        # part: the limit as it is would refuse plans that fit. See `search.stages.fitting`.
        return part.with_memory(part.device.memory_bytes * actors)


Search = Callable[[Request], tuple[Plan, Problem]]
"""Finds the plan of one step for what is requested: `search_plan` with all else given."""

Find = Callable[[Search, Request, int | None], tuple[Plan, Problem]]
"""Decides what is requested, for a batch of so many samples, and has it searched."""


def as_requested(search: Search, request: Request, batch_size: int | None) -> tuple[Plan, Problem]:
    """What is found for the request as it is."""
    return search(request)


def batched_inputs(step: StepGraph, batch_size: int | None) -> frozenset[Tensor]:
    """The step's arguments whose first dim is the batch."""
    if batch_size is None:
        return frozenset()
    return frozenset(t for t in step.arguments if t.shape and t.shape[0] == batch_size)


def state_problem(
    step: StepGraph,
    request: Request,
    batch_size: int | None,
    laid: Mapping[str, Spec] | None = None,
    state_ratio: float | None = None,
    part: bool = False,
    progress: Progress | None = None,
) -> Problem:
    """What a planner has to solve for a captured and simplified step.

    Args:
        laid: variables that lie already, by name.
        state_ratio: bytes of optimizer slots per byte of weight; read off the step's own
            variables if None.
        part: the step is part of what the constraints speak of: they may match nothing in it.
        progress: is told of the search.

    Raises:
        SpecError: a constraint that matches nothing or cannot hold.
        TfparError: more ranks than devices.
    """
    free = _free_problem(step, request, batch_size, laid, state_ratio, part, progress)
    return _constrained(free, step.graph, request, must_match=not part)


def _free_problem(
    step: StepGraph,
    request: Request,
    batch_size: int | None,
    laid: Mapping[str, Spec] | None,
    state_ratio: float | None,
    part: bool,
    progress: Progress | None,
) -> Problem:
    """What would have to be solved without constraints; arguments as of `state_problem`."""
    machines = request.machines
    cut = planning_graph(step.graph, step.gradients)
    if request.base is not None:
        meshes = [given_mesh(request.base.mesh, request.base.batch_axes)]
    else:
        meshes = logical_meshes(request.mesh)
    pipeline = request.pipeline
    if step.gradients and state_ratio is None:
        state_ratio = _slot_ratio(step, cut.graph.variables)
    return Problem(
        graph=cut.graph,
        meshes=meshes,
        cluster=machines,
        batched=batched_inputs(step, batch_size),
        fingerprint=fingerprint(cut.graph),
        variables=step.graph.variables,
        stand_ins=cut.stand_ins,
        fixed={name: Fixed(spec, "lies so already") for name, spec in (laid or {}).items()},
        state_ratio=state_ratio if step.gradients else None,
        compression=request.compression,
        recompute=False if part else request.recompute,
        microbatches=1 if part or pipeline is None else pipeline.order.num_microbatches,
        batch_statistics="exact" if pipeline is None else pipeline.batch_statistics,
        budget=request.budget,
        progress=progress,
    )


def _constrained(free: Problem, graph: Graph, request: Request, must_match: bool) -> Problem:
    """`free` under the constraints of `request`.

    Args:
        graph: the whole step.
        must_match: see `resolve_variables`.
    """
    mesh = request.mesh
    constraints = [c for c in request.constraints if not isinstance(c, PutInStage)]
    if not constraints:
        return free
    shapes = [(v.name, v.shape) for v in graph.variables]
    places = {v.name: v.place for v in graph.variables if v.place}
    variables = resolve_variables(constraints, shapes, mesh, must_match=must_match, places=places)
    outputs = resolve_outputs(constraints, graph, mesh, must_match=must_match)
    return dataclasses.replace(
        free,
        meshes=[given_mesh(mesh, batch_axes(constraints, mesh))],
        fixed={**free.fixed, **{n: Fixed(r.spec, r.reason) for n, r in variables.items()}},
        tensors={name: Fixed(r.spec, r.reason) for name, r in outputs.items()},
        constraints=tuple(map(str, constraints)),
    )


def search_plan(
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
    """State the problem of a captured and simplified step, and find its plan.

    Args: as of `state_problem` and `find_plan`.

    Raises:
        SpecError: a constraint that matches nothing or cannot hold.
        PlanError: no plan satisfies the constraints, or fits under them (a MemoryLimitError);
            says which of them conflict.
        ScheduleError: the pipeline's schedule can never end with the stages that it has.
        SearchInterrupted: Ctrl-C; knows the best plan so far.
    """

    def relaxed(kept: Collection[str]) -> Problem:
        # Mesh and batch are laid as they would be if the user left out the others, so that what is
        # said of the plan is what trying it gives: the batch may be split over an axis that no
        # constraint names any more, and without any the mesh is the search's choice.
        fewer = tuple(c for c in request.constraints if str(c) in kept)
        asked = dataclasses.replace(request, constraints=fewer)
        return _constrained(free, step.graph, asked, must_match=False)

    with searching() as progress:
        free = _free_problem(step, request, batch_size, laid, state_ratio, part, progress)
        problem = _constrained(free, step.graph, request, must_match=not part)

        def find(asked: Problem) -> Plan:
            return find_plan(asked, planner, cache, relaxed, interrupted)

        pipeline = request.pipeline
        if pipeline is None or pipeline.order.num_stages == 1:
            return find(problem), problem

        def staged(plan: Plan, deadline: Deadline | None) -> Plan:
            return in_stages(
                plan,
                step,
                pipeline,
                request.cluster,
                request.constraints,
                owners=request.owners,
                part=part,
                deadline=deadline or request.budget.start(),
            )

        price = scheduled_plan if pipeline.picks_schedule else priced_plan
        return find_in_stages(find, staged, problem, request.cluster, price), problem


def plan_step(
    step: StepGraph,
    request: Request,
    batch_size: int | None,
    planner: Planner,
    cache: PlanCache | None,
    state_ratio: float,
    observe: Observer = unobserved,
    find: Find = as_requested,
) -> Plan:
    """Plan a step that was captured to be planned, and lay out all its tensors.

    Args:
        find: decides the pipeline, where that is for the planner to find.
    """
    simplify_step(step, observe)

    def search(asked: Request) -> tuple[Plan, Problem]:
        return search_plan(step, asked, batch_size, planner, cache, state_ratio=state_ratio)

    plan, problem = find(search, request, batch_size)
    laid = lay_out(plan, problem)
    observe("propagate", lambda: str(laid))
    return plan.with_partitioned(laid)


def lay_out(plan: Plan, problem: Problem) -> PartitionedGraph:
    """The whole graph of a problem as `plan` lays it, with what it computes again."""
    return _laid(plan, recomputed_problem(problem, plan.recompute))


def _laid(plan: Plan, problem: Problem) -> PartitionedGraph:
    with collection_paused():
        laid = propagate(prepare(problem.graph), plan.mesh, step_anchors(plan, problem))
        laid.wire_dtypes = Roles.of(problem.graph, compression=problem.compression).wire_dtypes
        return laid


def price_whole(plan: Plan, problem: Problem) -> tuple[Cost, PartitionedGraph]:
    """What a plan costs that computes its batch in one piece, and the graph as it lays it."""
    again = recomputed_problem(problem, plan.recompute)
    laid = _laid(plan, again)
    roles = Roles.of(
        laid.graph, times=dict.fromkeys(again.stand_ins, 0), compression=problem.compression
    )
    return evaluate(laid, problem.cluster, roles, problem.state_ratio), laid


def cost_on_one_device(problem: Problem, cluster: Cluster) -> Cost:
    """What the step costs on one device of `cluster`, with nothing split."""
    with collection_paused():
        model = FoldedModel.of(problem, 2)
        return evaluate(model.on_one_device(), cluster, model.roles, problem.state_ratio)


def find_plan(
    problem: Problem,
    planner: Planner,
    cache: PlanCache | None = None,
    relaxed: Relaxed | None = None,
    interrupted: Interrupted | None = None,
) -> Plan:
    """The planner's plan, or the one that it found for the same problem before.

    Args:
        relaxed: by which to find out what conflicts where no plan satisfies the constraints or
            fits under them; without it the error is the planner's.
        interrupted: searches that Ctrl-C ended, which a further one is added to: for the same
            problem their best plan is used.

    Raises:
        PlanError: no plan satisfies the constraints; if one does but none fits into the memory of
            a device, it is a MemoryLimitError.
        SearchInterrupted: Ctrl-C; knows the best plan so far.
    """
    plan = cache.get(problem, planner) if cache is not None else None
    digest = problem_digest(problem, planner)
    if plan is None and interrupted is not None and digest in interrupted:
        plan = interrupted[digest].plan
        if plan is not None:
            logger.warning(
                "The search for a plan was interrupted before: the best plan that it had found is "
                "used, and there may be better ones. A new tap.auto_parallel searches to the end."
            )
    if plan is None:
        so_far = SoFar(problem.memory_limit)
        try:
            plan = _fitting(dataclasses.replace(problem, offer=so_far.offer), planner, relaxed)
        except KeyboardInterrupt:
            stopped = SearchInterrupted(functools.partial(_best_so_far, so_far, problem))
            if interrupted is not None:
                interrupted[digest] = stopped
            raise stopped from None
        if cache is not None and not plan.cut_short:
            cache.put(problem, planner, plan)
    return plan


def _best_so_far(so_far: SoFar, problem: Problem) -> Plan | None:
    """The best plan of an interrupted search, priced as a whole; None if there is none that fits.

    Planners price what they offer by what is quick to know of it.
    """
    plan = so_far.plan()
    if plan is None:
        return None
    cost, laid = price_whole(plan, problem)
    plan = dataclasses.replace(plan, cluster=problem.cluster, cost=cost, cut_short=True)
    return None if problem.excess(plan.cost) else plan.with_partitioned(laid)


def _fitting(problem: Problem, planner: Planner, relaxed: Relaxed | None) -> Plan:
    """The planner's plan, which fits; arguments and errors as of `find_plan`."""
    solve_any = functools.partial(_best, planner=planner)
    try:
        plan = solve_any(problem)
        if problem.excess(plan.cost):
            again = recomputed_problem(problem, plan.recompute)
            raise memory_error(
                dataclasses.replace(plan, cluster=problem.cluster),
                _laid(plan, again),
                problem.memory_limit,
                problem.state_ratio,
                bool(problem.fixed or problem.constraints),
            )
    except TimeLimitError:
        raise
    except PlanError as error:
        if relaxed is None:
            raise
        conflict = find_conflict(problem, relaxed, solve_any)
        if conflict is None:
            raise
        raise conflict_error(conflict, error, problem) from error
    return plan


def _best(problem: Problem, planner: Planner) -> Plan:
    """The planner's plan, fitting or not, as it runs: in microbatches, or in chunks if it fits."""
    if problem.microbatches > 1:
        return _best_in_microbatches(problem, planner)
    plan = with_batch_split(solve_with_recompute(problem, planner), problem)
    if plan.cost is None or problem.excess(plan.cost):
        return plan
    again = recomputed_problem(problem, plan.recompute)
    return in_chunks(plan, again, step_anchors(plan, again))


def _best_in_microbatches(problem: Problem, planner: Planner) -> Plan:
    """The fastest plan of all if it fits so; else the better of it and what fits in one piece."""
    plans = []
    for asked in (problem.aiming(memory_limit=math.inf), problem):
        plan = with_batch_split(solve_with_recompute(asked, planner), asked)
        again = recomputed_problem(problem, plan.recompute)
        plans.append(in_microbatches(plan, again, step_anchors(plan, again)))
        if not problem.excess(plans[-1].cost):
            break
    return min(plans, key=lambda p: problem.excess(p.cost))


def _slot_ratio(step: StepGraph, searched: Sequence[Variable]) -> float:
    """Bytes of the variables that only the update uses, but counters, per byte of weight."""
    names = {v.name for v in searched}
    weights = sum(v.num_bytes for v in step.graph.variables if v.trainable)
    slots = sum(v.num_bytes for v in step.graph.variables if v.shape and v.name not in names)
    return slots / weights if weights else 0.0
