"""Assignment of a layout to stages: a plan for the ranks of one actor becomes one for a
pipeline."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.constraints import Constraint, PutInStage, resolve_stages
from tfpar.ir.graph import Graph, Op
from tfpar.ir.planning_graph import planning_graph
from tfpar.ir.roles import BACKWARD, Roles, trains
from tfpar.ir.step import ModelLayer, StepGraph
from tfpar.pipeline import Pipeline
from tfpar.pipeline.colocation import infer_variable_stages, readers_of
from tfpar.pipeline.graph import check_schedule
from tfpar.pipeline.step_graph import stage_graph_of
from tfpar.pipeline.step_stages import assignable, stages_of_step
from tfpar.planning.deadline import Deadline
from tfpar.planning.inter_op.stages.assign import describe_excess
from tfpar.planning.inter_op.stages.bounds import TooManyStages
from tfpar.planning.inter_op.stages.limits import NO_LIMITS, StageLimits
from tfpar.planning.inter_op.stages.links import StageLinks
from tfpar.planning.inter_op.stages.memory_budget import PricedAssignment
from tfpar.planning.inter_op.stages.op_times import SingleDeviceProfile
from tfpar.planning.inter_op.stages.order_partition import Stages
from tfpar.planning.inter_op.stages.unit_builder import assign_step
from tfpar.planning.inter_op.stages.units import UnitGraph
from tfpar.planning.memo import Memo
from tfpar.plans import PipelinePlan, Plan
from tfpar.propagation.prepared_graph import prepare
from tfpar.spec import PlanError

logger = logging.getLogger("tfpar")


def assign_stages(
    plan: Plan,
    step: StepGraph,
    pipeline: Pipeline,
    cluster: Cluster,
    constraints: Sequence[Constraint] = (),
    *,
    sizes: tuple[int, ...] = (),
    owners: Mapping[str, int] | None = None,
    part: bool = False,
    ranks: tuple[int, ...] = (),
    before: Plan | None = None,
    deadline: Deadline | None = None,
    memo: Memo | None = None,
    jit_compile: bool = False,
    other_layout: Callable[[int], Plan] | None = None,
    limits: StageLimits = NO_LIMITS,
) -> Plan:
    """Assign `plan`, made for the ranks of the first stage, to the stages of a pipeline.

    The stages of ops follow from their times on one device of `cluster`, and from what stages send
    each other (`unit_builder`); where devices differ, a stage on slower ones gets less. A step that
    trains nothing runs where its weights are placed, if they are already, or if it has too few
    parts for so many stages. A pipeline of one stage leaves the plan as it is.

    Args:
        step: captured and simplified.
        cluster: the machines of all ranks.
        constraints: those of `tap.stage` fix stages.
        sizes: the number of ranks of each actor; by default that of the plan's mesh.
        owners: the stages in which variables are placed already, by name: their first readers stay
            there, where no constraint says otherwise. If they cannot all stay, all may move: a
            model that was compiled again may read them in another order.
        part: the step is part of what the constraints speak of: they may match nothing in it.
        ranks: of the job, one actor after the other; see `PipelinePlan`.
        before: the same plan in stages that were priced and do not fit into the memory of their
            devices: others are found, in which those that store too much get less.
        deadline: what is found by then is used.
        memo: of what was found for the step before; plans that differ in how they split it have the
            same stages.
        jit_compile: XLA compiles the step.
        other_layout: finds the plan of the whole step on the ranks of an actor, by its number,
            where actors have unequal numbers of ranks.
        limits: of the stages.

    Raises:
        SpecError: a constraint that matches nothing, or two that contradict each other.
        PlanError: a step that trains has fewer units than stages, or what is fixed leaves no
            assignment; it is an InfeasibleAssignment if none has room where `before` has none.
        ScheduleError: the schedule can never end with what these stages read of each other.
        TfparError: the devices of the cluster differ, and there are fewer than ranks.
        SearchStopped: the search was given up meanwhile.
    """
    schedule = pipeline.order
    sizes = sizes or (plan.mesh.size,) * schedule.num_actors
    placed = cluster.part(ranks) if ranks else cluster
    if schedule.num_stages == 1:
        return plan
    deadline, memo = deadline or Deadline(), memo or Memo()
    steps = memo.of(UncutSteps)
    if jit_compile not in steps:
        steps[jit_compile] = _Uncut.of(step, jit_compile)
    uncut = steps[jit_compile]
    cut, roles, ops, lying = uncut.graph, uncut.roles, uncut.ops, owners or {}
    fixed = resolve_stages(constraints, cut, ops, schedule.num_stages, must_match=not part)
    planned: PipelinePlan | None = None
    needed = trains(cut, roles)
    if ops and (needed or not _weights_lie(cut, lying)):
        kept = {**dict(_first_readers(cut, ops, lying)), **fixed}
        assigned = functools.partial(
            _assigned,
            uncut,
            pipeline,
            placed,
            sizes,
            laid=_laid(before, ops),
            memo=memo,
            tolerance=limits.tolerance,
        )
        try:
            planned = assigned(fixed=kept, deadline=deadline)
        except PlanError as error:
            if needed or not isinstance(error, TooManyStages):
                if not lying:
                    raise
                planned = assigned(fixed=fixed, deadline=deadline)
    if planned is None:
        planned, stage = _with_variables(cut, roles, ops, pipeline, lying, fixed)
    else:
        stage = stages_of_step(cut, roles, planned.forward_stages(ops))
        owners_of, table = memo.of(Owners), (schedule.num_stages, tuple(planned.scopes.items()))
        if table not in owners_of:
            owners_of[table] = _owners(step, planned)
        lie = owners_of[table]
        own = {name: lie[name] for name in lie if name in plan.variables}
        planned = dataclasses.replace(planned, owners=own)
    check_schedule(schedule, stage_graph_of(cut, roles, stage, schedule.num_stages))
    asked = [str(c) for c in constraints if isinstance(c, PutInStage)]
    return dataclasses.replace(
        plan,
        stages=_with_layouts(
            dataclasses.replace(planned, ranks=ranks, memory_limits=limits.memory_bytes),
            sizes,
            other_layout,
        ),
        microbatches=schedule.num_microbatches,
        batch_statistics=pipeline.batch_statistics,
        chunks=1,
        constraints=tuple(dict.fromkeys((*plan.constraints, *asked))),
        cluster=plan.cluster and cluster,
        # What was priced is the whole model on the ranks of one stage; see `memory.stages`.
        findings=dataclasses.replace(
            plan.findings,
            cost=None,
            layouts=(),
            passed_over=None,
            cut_short=plan.findings.cut_short or deadline.cut_short,
        ),
    )


def _with_layouts(
    stages: PipelinePlan, sizes: Sequence[int], find: Callable[[int], Plan] | None
) -> PipelinePlan:
    """Give the actors that have more or fewer ranks than the first layouts of their own."""
    others = {n: sizes.index(n) for n in sizes if n != sizes[0]}
    if not others:
        return stages
    assert find is not None, "unequal numbers of ranks"
    numbers = {sizes[0]: 0, **{n: i for i, n in enumerate(others, 1)}}
    return dataclasses.replace(
        stages,
        layouts=tuple(find(actor).layout for actor in others.values()),
        layout_of=tuple(numbers[n] for n in sizes),
    )


def _weights_lie(graph: Graph, lying: Mapping[str, int]) -> bool:
    """Whether all weights that a step reads, or of one without weights all variables, are placed in
    a stage already."""
    variables = [v for v in graph.variables if v.trainable] or graph.variables
    return bool(variables) and all(v.name in lying for v in variables)


def _with_variables(
    graph: Graph,
    roles: Roles,
    ops: Sequence[Op],
    pipeline: Pipeline,
    lying: Mapping[str, int],
    fixed: Mapping[Op, int],
) -> tuple[PipelinePlan, dict[Op, int]]:
    """The stages of a step that trains nothing and runs where its variables are placed; and of its
    ops."""
    forward = infer_variable_stages(graph, ops, lying, fixed)
    stage = stages_of_step(graph, roles, forward, lying)
    owners = {v.name: stage[v.handle.op] for v in graph.variables}
    return PipelinePlan(pipeline.order, {}, pipeline.recompute, owners), stage


def _laid(plan: Plan | None, ops: Sequence[Op]) -> PricedAssignment | None:
    """Return the stages of the ops in an earlier plan, with the cost of these; None if it has no
    priced stages."""
    stages = None if plan is None else plan.stages
    if stages is None or stages.cost is None:
        return None
    return PricedAssignment(stages.forward_stages(ops), stages.schedule.actors, stages.cost)


@dataclasses.dataclass(frozen=True, eq=False)
class _Uncut:
    """A step before it has stages.

    Attributes:
        graph: the part of it that is searched.
        roles: of its ops.
        ops: that are to be given a stage.
        layers: of the model, for messages.
    """

    graph: Graph
    roles: Roles
    ops: Sequence[Op]
    layers: Sequence[ModelLayer]

    @classmethod
    def of(cls, step: StepGraph, jit_compile: bool) -> _Uncut:
        graph = planning_graph(step.graph, step.gradients).graph
        roles = Roles.of(graph, step.gradient_tensors, jit_compile=jit_compile)
        return cls(graph, roles, assignable(graph, roles), step.layers)

    @functools.cached_property
    def alone(self) -> SingleDeviceProfile:
        """Profile the ops on one device."""
        return SingleDeviceProfile(prepare(self.graph), self.roles)


def _assigned(
    step: _Uncut,
    pipeline: Pipeline,
    cluster: Cluster,
    sizes: tuple[int, ...],
    *,
    laid: PricedAssignment | None,
    memo: Memo,
    tolerance: float | None,
    fixed: Mapping[Op, int],
    deadline: Deadline,
) -> PipelinePlan:
    """The stages of a step that has something to do in each of them; see `assign_step`.

    Args:
        cluster: the machines of the first stage, and of each behind those of the one before.
        sizes: ranks of each actor.
        laid: stages that do not fit.
        tolerance: as of `StageLimits`.
    """
    order = pipeline.order
    paces = step.alone.paces(cluster, order.actors, sizes, pipeline.recompute)
    links = StageLinks(cluster, tuple(order.actors), sizes, order.num_microbatches)

    def found(between: StageLinks | None) -> _Assigned:
        seconds = step.alone.seconds(cluster)
        units, assignment = assign_step(
            step.graph,
            step.roles,
            seconds.__getitem__,
            order.num_stages,
            fixed=fixed,
            paces=paces,
            before=laid,
            links=between,
            tolerance=tolerance,
            layers=step.layers,
            deadline=deadline,
        )
        if tolerance:  # of 0, stages are as balanced as they can be
            excess = describe_excess(units.graph, assignment, paces, tolerance)
            if excess:
                logger.warning(excess)
        forward = units.forward_stages(assignment.stages)
        stage = {op: forward[op] for op in step.ops}
        planned = _planned(step.graph, step.roles, stage, pipeline)
        return _Assigned(planned, units.graph, assignment.stages, deadline.cut_short)

    if laid is not None:
        return found(links).planned
    # Where ops lie does not hang on how a plan splits them, nor on the order of their tasks, nor on
    # the links as long as these are fast enough.
    settled = tuple(paces), tuple(fixed.items()), step.roles.jit_compile, tolerance
    key = order.num_stages, cluster.device, *settled
    known = memo.of(Assignments)
    if key not in known:
        known[key] = found(None)
    best = known[key]
    if links.is_link_bound(best.graph, best.stages, paces):
        linked = *key, links
        if linked not in known:
            known[linked] = found(links)
        best = known[linked]
    deadline.cut_short |= best.cut_short
    return dataclasses.replace(best.planned, schedule=order, recompute=pipeline.recompute)


class Assignments(dict[tuple[Hashable, ...], "_Assigned"]):
    """Stages that were found, by all that they depend on."""


class Owners(dict[tuple[Hashable, ...], Mapping[str, int]]):
    """The stages of variables, by the stages of scopes."""


class UncutSteps(dict[bool, "_Uncut"]):
    """Steps before they have stages, by whether XLA compiles them."""


class _Assigned(NamedTuple):
    """Stages, and the units that they were found with."""

    planned: PipelinePlan
    graph: UnitGraph
    stages: Stages
    cut_short: bool


def _planned(
    graph: Graph, roles: Roles, forward: Mapping[Op, int], pipeline: Pipeline
) -> PipelinePlan:
    """The stages of a forward pass.

    An op that is in no scope and has no gradients (metrics, masks of labels) goes with what it
    reads or what reads it, if nothing is against that: its names are counted up in each step anew,
    so that a table of them holds for one step only.
    """
    bound = _with_gradients(graph, roles)
    kept = {op: stage for op, stage in forward.items() if "/" in op.name or op in bound}
    with contextlib.suppress(PlanError):  # no stage without ops, no variable written in two
        known = PipelinePlan.of(pipeline.order, kept, pipeline.recompute).forward_stages(forward)
        settled = {op: known.get(op, stage) for op, stage in forward.items()}
        stages_of_step(graph, roles, settled)
        forward = settled
    return PipelinePlan.of(pipeline.order, forward, pipeline.recompute)


def _with_gradients(graph: Graph, roles: Roles) -> set[Op]:
    """The ops of the forward pass that depend on weights and that the backward pass depends on."""
    weights, consumers = {v.handle for v in graph.variables if v.trainable}, graph.consumers()
    trained: set[Op] = set()
    leading: set[Op] = set()
    for op in graph.ops:
        if any(t in weights or t.op in trained for t in op.inputs):
            trained.add(op)
    for op in reversed(graph.ops):
        readers = (r for t in op.outputs for r in consumers.get(t, ()))
        if any(r in leading or roles.phase[r] == BACKWARD for r in readers):
            leading.add(op)
    return trained & leading


def _first_readers(
    graph: Graph, ops: Sequence[Op], owners: Mapping[str, int]
) -> Iterator[tuple[Op, int]]:
    """Of variables that are placed in a stage already, the first op that reads each, and the
    stage."""
    members, consumers = set(ops), graph.consumers()
    place = {op: i for i, op in enumerate(ops)}
    for variable in graph.variables:
        touching = [op for op in consumers.get(variable.handle, ()) if op in members]
        touching += readers_of(variable.handle, consumers, members)
        if variable.name in owners and touching:
            yield min(touching, key=place.__getitem__), owners[variable.name]


def _owners(step: StepGraph, planned: PipelinePlan) -> dict[str, int]:
    """The stage of each variable of the whole step, slots and other state included."""
    roles = Roles.of(step.graph, step.gradient_tensors)
    forward = planned.forward_stages(assignable(step.graph, roles))
    stage = stages_of_step(step.graph, roles, forward)
    return {v.name: stage[v.handle.op] for v in step.graph.variables}
