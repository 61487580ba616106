"""Problems of one captured step: what a planner has to solve for what is requested."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from tfpar.constraints import (
    PutInStage,
    batch_axes,
    resolve_fsdp,
    resolve_outputs,
    resolve_variables,
)
from tfpar.ir.fingerprint import fingerprint
from tfpar.ir.graph import Graph, Tensor, Variable
from tfpar.ir.planning_graph import PlanningGraph, planning_graph
from tfpar.ir.step import StepGraph
from tfpar.planning.memo import Memo
from tfpar.planning.memory.blockwise_attention import problem_with_attention
from tfpar.planning.memory.gathered_weights import gathered_problem
from tfpar.planning.memory.offload import bound_to_device
from tfpar.planning.meshes import given_mesh, logical_meshes
from tfpar.planning.problem import (
    ConstrainedSpec,
    GivenSpecs,
    Problem,
    ProblemInstance,
    SearchAim,
    StepToPlan,
    StorageOptions,
)
from tfpar.planning.request import PlanRequest
from tfpar.plans import Offload
from tfpar.spec import Spec

MOST_KEPT = 3
"""Number of problems that are kept for when they are asked again: the relaxed estimates of some
numbers of stages are asked for, before plans in few of them are searched."""


def batched_inputs(step: StepGraph, batch_size: int | None) -> frozenset[Tensor]:
    """Return the step's arguments whose first dim is the batch."""
    if batch_size is None:
        return frozenset()
    return frozenset(t for t in step.arguments if t.shape and t.shape[0] == batch_size)


@dataclasses.dataclass(eq=False)
class StepProblems:
    """States the problems of a captured and simplified step.

    Attributes:
        batch_size: samples of the batch; None if unknown.
        laid: specs of variables that are placed already, by name; a request without a base decides
            them again.
        state_ratio: bytes of optimizer slots per byte of weight; read off the step's own variables
            if None.
        part: the step is part of what the constraints speak of (an evaluation or prediction): they
            may match nothing in it.
        graph_memo: the memo of what hangs on graphs alone.
    """

    step: StepGraph
    batch_size: int | None
    laid: Mapping[str, Spec] | None = None
    state_ratio: float | None = None
    part: bool = False

    def __post_init__(self) -> None:
        self.graph_memo = Memo()
        self._cut = planning_graph(self.step.graph, self.step.gradients)
        # What was requested last, and the problems without constraints that this states.
        self._last: list[tuple[PlanRequest, Problem]] = []

    def state(self, request: PlanRequest) -> Problem:
        """State the problem of a request; of a pipeline, for the ranks of a stage.

        Raises:
            SpecError: a constraint that matches nothing or cannot hold.
            TfparError: more ranks than devices.
        """
        free = self._without_constraints(request)
        return _constrain(free, self.step.graph, request, must_match=not self.part)

    def relax(self, request: PlanRequest, kept: Collection[str]) -> Problem:
        """State the problem under those constraints alone that read so.

        Mesh and batch are split as they would be if the user left out the others, so that what is
        said of the plan is what trying it gives: the batch may be split over an axis that no
        constraint names any more, and without any the mesh is the search's choice.
        """
        fewer = tuple(c for c in request.constraints if str(c) in kept)
        asked = dataclasses.replace(request, constraints=fewer)
        free = self._without_constraints(request)
        return _constrain(free, self.step.graph, asked, must_match=False)

    def _without_constraints(self, request: PlanRequest) -> Problem:
        """The problem without constraints; what is known of it holds for other microbatches."""
        for before, known in self._last:
            if _differ_in_microbatches(before, request):
                return self._in_pipeline(known, request)
        laid = None if request.base is None else self.laid
        found = _free_problem(self.step, self._cut, request, self.batch_size, laid, self)
        self._last = [(request, found), *self._last][:MOST_KEPT]
        return self._in_pipeline(found, request)

    def _in_pipeline(self, free: Problem, request: PlanRequest) -> Problem:
        """`free` in the microbatches that are requested; a part of a step has none."""
        return free if self.part else free.in_pipeline(request.pipeline)


def state_problem(
    step: StepGraph, request: PlanRequest, batch_size: int | None, state_ratio: float | None = None
) -> Problem:
    """State the problem of a step that is stated once; see `StepProblems.state`."""
    return StepProblems(step, batch_size, state_ratio=state_ratio).state(request)


def _free_problem(
    step: StepGraph,
    cut: PlanningGraph,
    request: PlanRequest,
    batch_size: int | None,
    laid: Mapping[str, Spec] | None,
    stated: StepProblems,
) -> Problem:
    """State the problem without constraints, in one piece.

    Args:
        cut: the part of the step that is searched.
    """
    if request.base is not None:
        meshes = [given_mesh(request.base.mesh, request.base.batch_axes)]
    else:
        given = [one for one in request.meshes if one.mesh.size == request.mesh.size]
        meshes = given or logical_meshes(request.mesh)
    state_ratio = stated.state_ratio
    if step.gradients and state_ratio is None:
        state_ratio = _slot_ratio(step, cut.graph.variables)
    constrained = {n: ConstrainedSpec(spec, "lies so already") for n, spec in (laid or {}).items()}
    instance = ProblemInstance(
        StepToPlan(
            graph=cut.graph,
            batched=batched_inputs(step, batch_size),
            fingerprint=fingerprint(cut.graph),
            variables=step.graph.variables,
            zero_cost_ops=cut.stand_ins,
            state_ratio=state_ratio if step.gradients else None,
            compression=request.compression,
            jit_compile=request.jit_compile,
            bound=frozenset() if stated.part else bound_to_device(step.graph),
            graph_memo=stated.graph_memo,
        ),
        next(iter(request.machine_types(request.ranks or ()))),
        GivenSpecs(constrained),
        StorageOptions(
            False if stated.part else request.recompute,
            Offload() if stated.part else request.offload,
            request.attention,
        ),
    )
    aim = SearchAim(budget=request.budget, progress=request.progress.priced)
    return Problem(instance, meshes, aim=aim)


def _constrain(free: Problem, graph: Graph, request: PlanRequest, must_match: bool) -> Problem:
    """`free` under the constraints of `request`.

    Args:
        graph: the whole step.
        must_match: see `resolve_variables`.
    """
    mesh = request.mesh
    before = request.base.attention if request.base is not None else request.attention
    free = problem_with_attention(free, before)
    constraints = [c for c in request.constraints if not isinstance(c, PutInStage)]
    if not constraints:
        return free
    shapes = [(v.name, v.shape) for v in graph.variables]
    places = {v.name: v.place for v in graph.variables if v.place}
    variables = resolve_variables(constraints, shapes, mesh, must_match=must_match, places=places)
    outputs = resolve_outputs(constraints, graph, mesh, must_match=must_match)
    sharded = resolve_fsdp(constraints, graph.variables, mesh, variables, must_match=must_match)
    specs = {name: ConstrainedSpec(r.spec, r.reason) for name, r in variables.items()}
    specs |= {name: ConstrainedSpec(**vars(weight)) for name, weight in sharded.items()}
    constrained = free.with_given(
        variables={**free.given.variables, **specs},
        tensors={name: ConstrainedSpec(r.spec, r.reason) for name, r in outputs.items()},
        constraints=tuple(map(str, constraints)),
    )
    gathering = gathered_problem(constrained, constrained.given.variables)
    return gathering.with_meshes([given_mesh(mesh, batch_axes(constraints, mesh))])


def _differ_in_microbatches(one: PlanRequest, other: PlanRequest) -> bool:
    """Whether two requests differ in nothing else, if in that."""
    same = dataclasses.replace(one, pipeline=other.pipeline) == other
    return same and one.num_actors == other.num_actors


def _slot_ratio(step: StepGraph, searched: Sequence[Variable]) -> float:
    """Bytes of the variables that only the update uses, but counters, per byte of weight."""
    names = {v.name for v in searched}
    weights = sum(v.num_bytes for v in step.graph.variables if v.trainable)
    slots = sum(v.num_bytes for v in step.graph.variables if v.shape and v.name not in names)
    return slots / weights if weights else 0.0
