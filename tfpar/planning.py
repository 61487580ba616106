"""From a captured step to its plan: the problem is stated, and a planner or a cache answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.capture.step import CapturedStep
from tfpar.cluster.description import Cluster
from tfpar.constraints import Constraint, batch_axes, resolve_outputs, resolve_variables
from tfpar.ir.collection import collection_paused
from tfpar.ir.fingerprint import fingerprint
from tfpar.ir.graph import Tensor
from tfpar.ir.planning_graph import planning_graph
from tfpar.ir.roles import Roles
from tfpar.plans import Plan
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import Anchors, PartitionedGraph
from tfpar.propagation.prepared import prepare
from tfpar.report.memory import memory_error
from tfpar.report.progress import searching
from tfpar.runtime.executable import simplify_step
from tfpar.search.cache import PlanCache
from tfpar.search.chunks import in_chunks
from tfpar.search.problem import (
    Fixed,
    Planner,
    Problem,
    Progress,
    free_layouts,
    given_layout,
    input_spec,
)
from tfpar.search.recompute import recomputed_problem, solve
from tfpar.spec import Mesh, Spec, replicated


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks of a planner.

    Attributes:
        mesh: the physical shape of the ranks.
        base: a plan that fixed the logical mesh for other models of the same session.
        compression: the dtype in which gradients travel; None: their own.
        recompute: see `search.problem.Problem`.
    """

    mesh: Mesh
    cluster: Cluster
    constraints: tuple[Constraint, ...] = ()
    base: Plan | None = None
    compression: str | None = None
    recompute: bool | tuple[str, ...] | None = None


def batched_inputs(captured: CapturedStep, batch_size: int | None) -> frozenset[Tensor]:
    """The step's arguments whose first dim is the batch."""
    arguments = captured.graph.inputs[: captured.num_arguments]
    if batch_size is None:
        return frozenset()
    return frozenset(t for t in arguments if t.shape and t.shape[0] == batch_size)


def state_problem(
    captured: CapturedStep, request: Request, batch_size: int | None,
    laid: dict[str, Spec] | None = None, state_ratio: float | None = None, part: bool = False,
    progress: Progress | None = None,
) -> Problem:  # fmt: skip
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
    graph, constraints = captured.graph, request.constraints
    cut = planning_graph(graph, captured.gradients)
    if constraints:
        layouts = [given_layout(request.mesh, batch_axes(constraints, request.mesh))]
    elif request.base is not None:
        layouts = [given_layout(request.base.mesh, request.base.batch_axes)]
    else:
        layouts = free_layouts(request.mesh)
    mesh = layouts[0].mesh
    request.cluster.check(mesh)
    shapes = [(v.name, v.shape) for v in graph.variables]
    fixed = {name: Fixed(spec, "lies so already") for name, spec in (laid or {}).items()}
    resolved = resolve_variables(constraints, shapes, mesh, must_match=not part)
    fixed.update((name, Fixed(r.spec, r.reason)) for name, r in resolved.items())
    outputs = resolve_outputs(constraints, graph, mesh, must_match=not part)
    if captured.gradients and state_ratio is None:
        state_ratio = _slot_ratio(captured, cut.graph.variables)
    return Problem(
        graph=cut.graph,
        layouts=layouts,
        cluster=request.cluster,
        batched=batched_inputs(captured, batch_size),
        fingerprint=fingerprint(cut.graph),
        variables=graph.variables,
        stand_ins=cut.stand_ins,
        fixed=fixed,
        tensors={name: Fixed(r.spec, r.reason) for name, r in outputs.items()},
        constraints=tuple(map(str, constraints)),
        state_ratio=state_ratio if captured.gradients else None,
        compression=request.compression,
        recompute=False if part else request.recompute,
        progress=progress,
    )


def plan_step(
    captured: CapturedStep, request: Request, batch_size: int | None, planner: Planner,
    cache: PlanCache | None, state_ratio: float,
) -> Plan:  # fmt: skip
    """Plan a step that was captured to be planned, and lay out all its tensors."""
    simplify_step(captured)
    with searching() as progress:
        problem = state_problem(
            captured, request, batch_size, state_ratio=state_ratio, progress=progress
        )
        plan = find_plan(problem, planner, cache)
    return plan.with_partitioned(lay_out(plan, problem))


def lay_out(plan: Plan, problem: Problem) -> PartitionedGraph:
    """The whole graph of a problem as `plan` lays it, with what it computes again."""
    return _laid(plan, recomputed_problem(problem, plan.recompute))


def _laid(plan: Plan, problem: Problem) -> PartitionedGraph:
    with collection_paused():
        laid = propagate(prepare(problem.graph), plan.mesh, step_anchors(plan, problem))
        laid.carried = Roles.of(problem.graph, compression=problem.compression).carried
        return laid


def step_anchors(plan: Plan, problem: Problem) -> Anchors:
    """What `plan` fixes of the problem's graph, inputs and outputs included."""
    axes = [plan.mesh.axis(n) for n in plan.batch_axes]
    graph = problem.graph
    return dataclasses.replace(
        plan.anchors(),
        inputs=[input_spec(t in problem.batched, plan.mesh, axes) for t in graph.inputs],
        outputs=[replicated(plan.mesh.num_axes)] * len(graph.outputs),
    )


def find_plan(problem: Problem, planner: Planner, cache: PlanCache | None = None) -> Plan:
    """The planner's plan, or the one that it found for the same problem before.

    Raises:
        PlanError: no plan satisfies the constraints; if one does but none fits into the memory of
            a device, it is a MemoryLimitError.
    """
    plan = cache.get(problem, planner) if cache is not None else None
    if plan is None:
        plan = solve(problem, planner)
        if plan.cost is not None:
            again = recomputed_problem(problem, plan.recompute)
            if plan.cost.memory_bytes > problem.cluster.device.memory_bytes:
                raise memory_error(plan, _laid(plan, again), again)
            plan = in_chunks(plan, again, step_anchors(plan, again))
        if cache is not None and not plan.cut_short:
            cache.put(problem, planner, plan)
    return plan


def _slot_ratio(captured: CapturedStep, searched: Sequence) -> float:
    """Bytes of the variables that only the update uses, per byte of weight."""
    names = {v.name for v in searched}
    weights = sum(v.num_bytes for v in captured.graph.variables if v.trainable)
    slots = sum(v.num_bytes for v in captured.graph.variables if v.name not in names)
    return slots / weights if weights else 0.0
