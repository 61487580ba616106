"""From a captured step to its plan: the problem is stated, and its plan asked for."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from tfpar.cluster.description import Cluster
from tfpar.constraints import (
    Constraint,
    PutInStage,
    batch_axes,
    resolve_outputs,
    resolve_variables,
)
from tfpar.cost.cost import Cost
from tfpar.ir.fingerprint import fingerprint
from tfpar.ir.graph import Graph, Tensor, Variable
from tfpar.ir.planning_graph import PlanningGraph, planning_graph
from tfpar.ir.step import StepGraph
from tfpar.pipeline import Pipeline
from tfpar.planning_found import Interrupted, find_plan, until_interrupted
from tfpar.planning_priced import cost_on_one_device, with_shares
from tfpar.planning_stages import plan_in_stages
from tfpar.plans import Offload, Plan
from tfpar.report.progress import QUIET, Reporter
from tfpar.search.cache import PlanCache
from tfpar.search.known import Known
from tfpar.search.memory_errors import check_room
from tfpar.search.meshes import LogicalMesh, given_mesh, logical_meshes
from tfpar.search.objective import Budget
from tfpar.search.offload import bound_to_device
from tfpar.search.problem import Fixed, Planner, Problem
from tfpar.search.so_far import MakePlan, SearchInterrupted
from tfpar.search.stages.kinds import kinds_of_stages
from tfpar.search.stages.planned import in_stages
from tfpar.search.stages.promise import Promise, promise
from tfpar.spec import Mesh, PlanError, Spec

logger = logging.getLogger("tfpar")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks of a planner.

    Attributes:
        mesh: the physical shape of the ranks; of a pipeline, of those of one stage.
        cluster: the machines of all ranks.
        base: a plan that fixed the logical mesh for other models of the same session.
        compression: the dtype in which gradients travel; None: their own.
        recompute, offload: see `search.problem.Problem`.
        pipeline: the stages and microbatches of a training step; None: one of each.
        budget: what each search may take.
        owners: the stages that variables of the pipeline lie in already, by name.
        ranks: of the job, one set of ranks of the pipeline after the other (`PlannedStages`); None:
            as is best.
        report: is told what the search is at.
        meshes: the logical meshes to choose from; by default all that the ranks can be laid in.
        jit_compile: XLA compiles the step; see `search.problem.Problem`.
    """

    mesh: Mesh
    cluster: Cluster
    constraints: tuple[Constraint, ...] = ()
    base: Plan | None = None
    compression: str | None = None
    recompute: bool | tuple[str, ...] | None = None
    offload: Offload | None = None
    pipeline: Pipeline | None = None
    budget: Budget = Budget()
    owners: Mapping[str, int] = dataclasses.field(default_factory=dict)
    ranks: tuple[int, ...] | None = None
    report: Reporter = QUIET
    meshes: tuple[LogicalMesh, ...] = ()
    jit_compile: bool = False

    @property
    def actors(self) -> int:
        """Sets of ranks, one behind the other."""
        return 1 if self.pipeline is None else self.pipeline.order.num_actors

    def kinds(self, ranks: Sequence[int] = ()) -> Mapping[Cluster, int]:
        """The machines on which plans are searched, and how many sets of ranks have such: those of
        all ranks, or of a pipeline's sets of ranks; of sets that are alike, the first.

        Args:
            ranks: of the pipeline; by default all in their order.

        Raises:
            TfparError: more ranks than devices.
        """
        if self.actors == 1:
            self.cluster.check(self.mesh)
            return {self.cluster: 1}
        self.cluster.check(Mesh.of(self.actors * self.mesh.size))
        machines = self.cluster.part(ranks) if ranks else self.cluster
        return kinds_of_stages(machines, self.mesh.size, self.actors)


MOST_KEPT = 3
"""How many problems are kept for when they are asked again: what a pipeline promises is asked of
some numbers of stages, before plans in few of them are searched."""

Search = Callable[[Request], tuple[Plan, Problem]]
"""Finds the plan of one step for what is requested; see `StepSearch`."""

Find = Callable[["StepSearch", Request, int | None], tuple[Plan, Problem]]
"""Decides what is requested, for a batch of so many samples, and has it searched."""


def as_requested(
    search: StepSearch, request: Request, batch_size: int | None
) -> tuple[Plan, Problem]:
    """What is found for the request as it is."""
    micro = 1 if request.pipeline is None else request.pipeline.order.num_microbatches
    if batch_size is not None and micro > batch_size and search.step.gradients:
        logger.warning(
            f"A batch of {batch_size} is cut in {micro} microbatches: {micro - batch_size} of them "
            f"are all padding, and take as long as the others. Ask for {batch_size} at most."
        )
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
) -> Problem:
    """What a planner has to solve for a captured and simplified step.

    Args:
        laid: variables that lie already, by name.
        state_ratio: bytes of optimizer slots per byte of weight; read off the step's own
            variables if None.
        part: the step is part of what the constraints speak of: they may match nothing in it.

    Raises:
        SpecError: a constraint that matches nothing or cannot hold.
        TfparError: more ranks than devices.
    """
    cut = planning_graph(step.graph, step.gradients)
    free = _free_problem(step, cut, request, batch_size, laid, state_ratio, part)
    free = _in_pipeline(free, request, part)
    return _constrained(free, step.graph, request, must_match=not part)


def _free_problem(
    step: StepGraph,
    cut: PlanningGraph,
    request: Request,
    batch_size: int | None,
    laid: Mapping[str, Spec] | None,
    state_ratio: float | None,
    part: bool,
) -> Problem:
    """What would have to be solved without constraints; arguments as of `state_problem`.

    Args:
        cut: the part of the step that is searched.
    """
    if request.base is not None:
        meshes = [given_mesh(request.base.mesh, request.base.batch_axes)]
    else:
        meshes = list(request.meshes) or logical_meshes(request.mesh)
    if step.gradients and state_ratio is None:
        state_ratio = _slot_ratio(step, cut.graph.variables)
    return Problem(
        graph=cut.graph,
        meshes=meshes,
        cluster=next(iter(request.kinds(request.ranks or ()))),
        batched=batched_inputs(step, batch_size),
        fingerprint=fingerprint(cut.graph),
        variables=step.graph.variables,
        stand_ins=cut.stand_ins,
        fixed={name: Fixed(spec, "lies so already") for name, spec in (laid or {}).items()},
        state_ratio=state_ratio if step.gradients else None,
        compression=request.compression,
        jit_compile=request.jit_compile,
        recompute=False if part else request.recompute,
        offload=Offload() if part else request.offload,
        bound=frozenset() if part else bound_to_device(step.graph),
        budget=request.budget,
        progress=request.report.priced,
    )


def _in_pipeline(free: Problem, request: Request, part: bool) -> Problem:
    """`free` in the microbatches that are requested; a part of a step has none."""
    return free if part else free.in_pipeline(request.pipeline)


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


@dataclasses.dataclass(eq=False)
class StepSearch:
    """Finds plans of one captured and simplified step.

    Attributes:
        step, batch_size, state_ratio, part: as of `state_problem`.
        planner, cache, interrupted: as of `find_plan`.
        laid: variables that lie already, by name; a request without a base lays them anew.
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
        # What was requested last, and the problems without constraints that this states.
        self._last: list[tuple[Request, Problem]] = []
        self._cut = planning_graph(self.step.graph, self.step.gradients)
        self._of_graphs = Known()
        self._told_of_miss = False

    def __call__(self, request: Request) -> tuple[Plan, Problem]:
        """The plan that is found, and its problem.

        Raises:
            SpecError: a constraint that matches nothing or cannot hold.
            PlanError: no plan satisfies the constraints, or fits under them (a MemoryLimitError);
                says which of them conflict.
            ScheduleError: the pipeline's schedule can never end with the stages that it has.
            SearchInterrupted: Ctrl-C; knows the best plan so far.
        """
        with request.report.at("", request.budget.seconds):
            problem = self.problem(request)

            def find(asked: Problem) -> Plan:
                def relaxed(kept: Collection[str]) -> Problem:
                    return self._relaxed(request, kept).on(asked.cluster)

                return find_plan(asked, self.planner, self.cache, relaxed, self.interrupted, missed)

            def missed(asked: Problem) -> None:
                if self.cache is not None and not self._told_of_miss:
                    self._told_of_miss = True  # what follows is nearest to what is kept by then
                    request.report.note(self.cache.nearest(asked, self.planner))

            def tell(make: MakePlan, cost: Cost | None) -> None:
                if cost is not None and not problem.excess(cost):
                    request.report.found(cost.seconds)

            pipeline = request.pipeline
            if pipeline is None:
                plan = find(problem.telling(tell))
            elif pipeline.order.num_stages == 1:
                plan = find(problem)
            else:
                plan, problem = self._in_stages(find, problem, request)
            if not self.part:
                plan = with_shares(plan, problem, request.cluster, self.batch_size)
            return plan, problem

    def _in_stages(
        self, find: Callable[[Problem], Plan], problem: Problem, request: Request
    ) -> tuple[Plan, Problem]:
        def seconds(machines: Cluster) -> float:
            forward, backward, _ = cost_on_one_device(problem, machines).compute_s
            return forward + backward

        return plan_in_stages(find, seconds, problem, self.step, request, self.part)

    def check_room(self, request: Request) -> None:
        """Check that the devices of the request have room for the step at all, in stages or
        without.

        Raises:
            MemoryLimitError: they have not.
        """
        problem, devices = self.problem(request), request.cluster.devices[: request.mesh.size]
        check_room(problem, [device.memory_bytes for device in devices])

    def restaged(self, plan: Plan, request: Request) -> Plan:
        """A plan that has stages with those of the request's pipeline, not priced yet.

        How weights are split stays, and which ranks are together.

        Raises:
            PlanError, ScheduleError: as of `search.stages.planned.in_stages`.
        """
        assert plan.stages is not None and request.pipeline is not None, "a request for stages"
        return in_stages(
            dataclasses.replace(plan, stages=None),
            self.step,
            request.pipeline,
            request.cluster,
            request.constraints,
            owners=request.owners,
            part=self.part,
            ranks=plan.stages.ranks,
            deadline=request.budget.start(),
            known=None if self.part else self._of_graphs,
            jit_compile=request.jit_compile,
        )

    def promise(self, request: Request) -> Promise | None:
        """What the fastest plan of all promises, with a second forward pass if it does not fit;
        None if a plan is known already, or there is none.

        Raises:
            SpecError: as of a call.
            SearchInterrupted: as of a call; of the ranks of a stage it knows nothing.
        """
        problem = self.problem(request)
        if self.cache is not None and self.cache.get(problem, self.planner) is not None:
            return None
        actors, kinds = request.actors, request.kinds(request.ranks or ())
        interrupted = self.interrupted if actors == 1 else {}
        with request.report.at("", request.budget.seconds):
            try:
                return until_interrupted(
                    problem,
                    self.planner,
                    interrupted,
                    lambda asked: promise(asked, self.planner, request.pipeline, kinds),
                )
            except PlanError:
                return None
            except SearchInterrupted:
                if actors == 1:
                    raise
                raise KeyboardInterrupt from None

    def problem(self, request: Request) -> Problem:
        """What is solved for a request; of a pipeline, for the ranks of a stage."""
        free = self._free_problem(request)
        return _constrained(free, self.step.graph, request, must_match=not self.part)

    def _free_problem(self, request: Request) -> Problem:
        """The problem without constraints; what is known of it holds for other microbatches."""
        for before, known in self._last:
            if _differ_in_microbatches(before, request):
                return _in_pipeline(known, request, self.part)
        found = _free_problem(
            self.step,
            self._cut,
            request,
            self.batch_size,
            None if request.base is None else self.laid,
            self.state_ratio,
            self.part,
        )
        found = dataclasses.replace(found, of_graphs=self._of_graphs)
        self._last = [(request, found), *self._last][:MOST_KEPT]
        return _in_pipeline(found, request, self.part)

    def _relaxed(self, request: Request, kept: Collection[str]) -> Problem:
        # Mesh and batch are laid as they would be if the user left out the others, so that what is
        # said of the plan is what trying it gives: the batch may be split over an axis that no
        # constraint names any more, and without any the mesh is the search's choice.
        fewer = tuple(c for c in request.constraints if str(c) in kept)
        asked = dataclasses.replace(request, constraints=fewer)
        free = self._free_problem(request)
        return _constrained(free, self.step.graph, asked, must_match=False)


def _differ_in_microbatches(one: Request, other: Request) -> bool:
    """Whether two requests differ in nothing else, if in that."""
    same = dataclasses.replace(one, pipeline=other.pipeline) == other
    return same and one.actors == other.actors


def _slot_ratio(step: StepGraph, searched: Sequence[Variable]) -> float:
    """Bytes of the variables that only the update uses, but counters, per byte of weight."""
    names = {v.name for v in searched}
    weights = sum(v.num_bytes for v in step.graph.variables if v.trainable)
    slots = sum(v.num_bytes for v in step.graph.variables if v.shape and v.name not in names)
    return slots / weights if weights else 0.0
