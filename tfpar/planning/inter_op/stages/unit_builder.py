"""The units of a training step, and the stages that they are assigned to.

Units are taken as coarse as balance allows, from three levels: blocks that repeat, and the
GraphNodes between them; GraphNodes; single ops. Only those go to the next level amid which a stage
would end if all took equally long. So a deep model is a short program, and a shallow one can still
be cut anywhere. Where units of a level read of each other in a circle (a scope that is left and
entered again), or are to be in two stages at once, the next level takes their place. What touches a
variable that the forward pass writes, such as running statistics, stays together, as does what
reads a list, or a tensor of unknown shape, and what makes it.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import networkx as nx

from tfpar.ir.constants import Constants
from tfpar.ir.graph import Graph, Op, is_floating
from tfpar.ir.graph_nodes import cluster
from tfpar.ir.roles import BACKWARD, FORWARD, UPDATE, Roles
from tfpar.ir.shared_subgraphs import Signatures, prune_graph, repeated_blocks
from tfpar.ir.step import ModelLayer
from tfpar.ir.traits import LOOPS
from tfpar.pipeline.colocation import readers_of, together
from tfpar.pipeline.step_stages import assignable, stages_of_step
from tfpar.planning.deadline import Deadline
from tfpar.planning.inter_op.stages.assign import TOLERANCE, Assignment, assign
from tfpar.planning.inter_op.stages.bounds import fixed_bounds
from tfpar.planning.inter_op.stages.links import StageLinks
from tfpar.planning.inter_op.stages.loop_names import describe_loop
from tfpar.planning.inter_op.stages.memory_budget import InfeasibleAssignment, PricedAssignment
from tfpar.planning.inter_op.stages.order_partition import partition_order
from tfpar.planning.inter_op.stages.slowdowns import (
    Paces,
    balanced_seconds,
    cumulative_throughput,
    normalize_slowdowns,
)
from tfpar.planning.inter_op.stages.units import Flow, TiedWeight, Unit, UnitGraph
from tfpar.spec import PlanError

LEAST_GAIN = 1e-3
"""Relative gain of the best cut below which finer units count as no help."""

PATIENCE = 3
"""Number of times in a row that finer units are no help, after which none are tried."""

Level = Mapping[Op, Hashable]
"""By op, what it belongs to; levels from the coarsest to the finest."""


@dataclasses.dataclass(frozen=True)
class StepUnits:
    """The units of a step.

    Attributes:
        graph: what is assigned to stages.
        unit_of: the place of the unit of each op that is to be given a stage.
    """

    graph: UnitGraph
    unit_of: Mapping[Op, int]

    def forward_stages(self, stages: Sequence[int]) -> dict[Op, int]:
        """Return the stage of each op, of those of the units; `stages_of_step` takes it."""
        return {op: stages[unit] for op, unit in self.unit_of.items()}


def assign_step(
    graph: Graph,
    roles: Roles,
    seconds: Callable[[Op], float],
    num_stages: int,
    *,
    fixed: Mapping[Op, int] | None = None,
    paces: Paces | None = None,
    before: PricedAssignment | None = None,
    links: StageLinks | None = None,
    tolerance: float | None = None,
    layers: Sequence[ModelLayer] = (),
    deadline: Deadline | None = None,
) -> tuple[StepUnits, Assignment]:
    """Assign a step's units to the stages that send least, as `assign` finds them.

    Args:
        seconds: of one op, forward or backward, of a whole batch, on a stage of pace 1.
        fixed: stages of ops, as far as they are given; the rest of a unit goes with them.
        paces: of stages; by default all 1.
        before: stages in which they do not fit into memory: others are found that may.
        links: between the devices of stages; None: what is sent takes no time.
        tolerance: as of `assign`. Finer units are
            tried until the best cut keeps to that, or to what the longest op takes, as long as they
            help; if none does, those are taken whose best cut is the fastest.
        layers: of the model, for messages.
        deadline: what is found by then is used.

    Raises:
        PlanError: there are more stages than units of any level, or what is fixed leaves no
            assignment; it is an InfeasibleAssignment if units of no level fit.
        SearchStopped: the search was given up meanwhile.
    """
    given, paces = fixed or {}, normalize_slowdowns(paces, num_stages)
    ops = assignable(graph, roles)
    if not ops:
        raise PlanError("The step computes nothing of what it is fed: there is nothing to assign.")
    longest = max(seconds(op) for op in graph.ops if roles.phase[op] != UPDATE) * min(paces)
    joined, levels = together(graph, ops), _levels(graph, roles, ops)
    most = TOLERANCE if tolerance is None else tolerance
    depth = dict.fromkeys(ops, 0)
    best, least, in_vain = None, (True, math.inf), 0
    while True:
        parts = parts_in_order(ops, joined, levels, given, depth)
        units = _step_units(graph, roles, seconds, parts, given, layers)
        found = len(parts) < num_stages, _slowest(units.graph, paces)
        is_better = (found[0], found[1] * (1 + LEAST_GAIN)) < least
        in_vain = 0 if is_better or math.isinf(found[1]) else in_vain + 1
        if best is None or found < least or math.isinf(found[1]):
            best, least = units, found
        allowed = max(balanced_seconds(units.graph.seconds, paces), longest) * (1 + most)
        is_done = found <= (False, allowed) or in_vain == PATIENCE
        finer = [] if is_done else _too_large(units, depth, len(levels) - 1, paces)
        if not finer:
            rooms = None if before is None else before.rooms(best.graph, best.unit_of)
            try:
                return best, assign(
                    best.graph,
                    num_stages,
                    paces=paces,
                    rooms=rooms,
                    links=links,
                    tolerance=tolerance,
                    deadline=deadline,
                )
            except InfeasibleAssignment:
                assert rooms is not None, "without rooms everything fits"
                if rooms.too_small(best.graph):  # finer units need as much
                    raise
                finer = _too_large(units, depth, len(levels) - 1, paces)
                if not finer:
                    raise
                best, in_vain = None, 0
        depth.update((op, depth[op] + 1) for op in finer)


def _too_large(units: StepUnits, depth: Mapping[Op, int], deepest: int, paces: Paces) -> list[Op]:
    """The ops of units that are to be cut, of those that can be: where balanced stages would end
    amid them; or else those that take half as long as the longest at least."""
    coarse: dict[int, list[Op]] = {}
    for op, unit in units.unit_of.items():
        if depth[op] < deepest:
            coarse.setdefault(unit, []).append(op)
    seconds = [unit.seconds for unit in units.graph.units]
    average, ends = balanced_seconds(units.graph.seconds, paces), [*itertools.accumulate(seconds)]
    cut = {
        bisect.bisect_right(ends, share * average) for share in cumulative_throughput(paces)[:-1]
    }
    if cut.isdisjoint(coarse):
        enough = max((seconds[unit] for unit in coarse), default=0.0) / 2
        cut = {unit for unit in coarse if seconds[unit] >= enough}
    return [op for unit in sorted(cut & coarse.keys()) for op in coarse[unit]]


def _slowest(graph: UnitGraph, paces: Paces) -> float:
    """Seconds of the slowest stage of the best cut, if what is fixed leaves any."""
    num_stages = len(paces)
    try:
        stages = partition_order(graph, fixed_bounds(graph, num_stages), num_stages, paces)
    except PlanError:
        return math.inf
    return math.inf if stages is None else max(graph.stage_seconds(stages, paces))


def _levels(graph: Graph, roles: Roles, ops: Sequence[Op]) -> list[Level]:
    nodes = cluster(graph, roles)
    signatures = Signatures(Constants(graph), roles)
    repeats = repeated_blocks(nodes, prune_graph(nodes, signatures), signatures)
    block_of = {
        node: (number, i)
        for number, repeat in enumerate(repeats)
        for i, members in enumerate(repeat.instances)
        for node in members
    }
    by_node: dict[Op, Hashable] = {op: nodes.node_of.get(op, op) for op in ops}
    by_block: dict[Op, Hashable] = {
        op: block_of.get(nodes.node_of[op], nodes.node_of[op]) if op in nodes.node_of else op
        for op in ops
    }
    return [by_block, by_node, {op: op for op in ops}]


def parts_in_order(
    ops: Sequence[Op],
    joined: Sequence[tuple[Op, Op]],
    levels: Sequence[Level],
    fixed: Mapping[Op, int],
    depth: dict[Op, int],
) -> list[list[Op]]:
    """Return the ops of each unit, in a topological order.

    Args:
        joined: ops that stay together.
        levels: see `Level`.
        depth: the level of each op at the start; where that cannot be, it becomes a deeper one.
    """
    place = {op: i for i, op in enumerate(ops)}
    while True:
        label = {op: (depth[op], levels[depth[op]][op]) for op in ops}
        flow = nx.DiGraph()
        flow.add_nodes_from(dict.fromkeys(label.values()))
        for op in ops:
            flow.add_edges_from((label[t.op], label[op]) for t in op.inputs if t.op in label)
        for one, other in joined:
            flow.add_edges_from([(label[one], label[other]), (label[other], label[one])])
        members: dict[Hashable, list[Op]] = {}
        for op in ops:
            members.setdefault(label[op], []).append(op)
        whole = nx.condensation(flow)
        parts, split = {}, False
        for number, groups in whole.nodes(data="members"):
            part = sorted((op for g in groups for op in members[g]), key=place.__getitem__)
            parts[number] = part
            if len(groups) > 1 or len({fixed[op] for op in part if op in fixed}) > 1:
                finer = [op for op in part if depth[op] < len(levels) - 1]
                depth.update((op, depth[op] + 1) for op in finer)
                split = split or bool(finer)
        if not split:
            order = nx.lexicographical_topological_sort(whole, key=lambda n: place[parts[n][0]])
            return [parts[number] for number in order]


def _step_units(
    graph: Graph,
    roles: Roles,
    seconds: Callable[[Op], float],
    parts: Sequence[Sequence[Op]],
    fixed: Mapping[Op, int],
    layers: Sequence[ModelLayer],
) -> StepUnits:
    unit_of = {op: i for i, part in enumerate(parts) for op in part}
    taken = [0.0] * len(parts)
    for op, unit in stages_of_step(graph, roles, unit_of).items():
        if roles.phase[op] != UPDATE:
            taken[unit] += seconds(op)
    first, ties = _weights(graph, unit_of)
    kept = _kept(graph, roles, unit_of)
    units = []
    for i, part in enumerate(parts):
        given = {fixed[op]: op for op in part if op in fixed}
        if len(given) > 1:
            (stage, op), (other_stage, other) = [*given.items()][:2]
            raise PlanError(
                f"{op.name!r} is to be in stage {stage} and {other.name!r} in stage {other_stage}, "
                f"but they have to stay together: they touch one variable or "
                f"list. Give them one stage."
            )
        stored = first.get(i, 0.0), kept.get(i, 0.0)
        loops = [op for op in part if op.type in LOOPS]
        loop = describe_loop(max(loops, key=seconds), graph, layers) if loops else ""
        units.append(Unit(_name(part), taken[i], *stored, next(iter(given), None), loop))
    return StepUnits(UnitGraph(tuple(units), _flows(graph, roles, unit_of), ties), unit_of)


def _name(part: Sequence[Op]) -> str:
    """The scope that its ops have in common, or the name of the first."""
    scopes = [op.name.split("/") for op in part]
    common = []
    for parts in zip(*scopes, strict=False):
        if len({*parts}) > 1:
            break
        common.append(parts[0])
    return "/".join(common) if len(common) > 1 or len(part) == 1 else part[0].name


def _flows(graph: Graph, roles: Roles, unit_of: Mapping[Op, int]) -> tuple[Flow, ...]:
    """Return the flows between units; tensors of the same maker and readers are one flow."""
    trains = BACKWARD in roles.phase.values()
    consumers = graph.consumers()
    weights = {v.handle for v in graph.variables if v.trainable}
    trained: set[Op] = set()  # gradients come back to what depends on weights
    total: dict[tuple[int, tuple[int, ...]], float] = {}
    for op in graph.ops:
        if roles.phase[op] != FORWARD:
            continue
        if any(t.op in trained or t in weights for t in op.inputs):
            trained.add(op)
        if op not in unit_of:
            continue
        for tensor in op.outputs:
            reading = {unit_of[r] for r in consumers.get(tensor, ()) if r in unit_of}
            readers = tuple(sorted(reading - {unit_of[op]}))
            if readers:
                ways = 2 if trains and op in trained and is_floating(tensor.dtype) else 1
                key = unit_of[op], readers
                total[key] = total.get(key, 0.0) + ways * tensor.num_bytes
    return tuple(Flow(source, readers, size) for (source, readers), size in total.items())


def _weights(
    graph: Graph, unit_of: Mapping[Op, int]
) -> tuple[dict[int, float], tuple[TiedWeight, ...]]:
    """Bytes of the weights that each unit is the first to read, by unit; and those that others read
    too."""
    consumers = graph.consumers()
    members = set(unit_of)
    first: dict[int, float] = {}
    ties = []
    for variable in graph.variables:
        touching = [op for op in consumers.get(variable.handle, ()) if op in unit_of]
        touching += readers_of(variable.handle, consumers, members)
        readers = tuple(sorted({unit_of[op] for op in touching}))
        if len(readers) > 1:
            ties.append(TiedWeight(readers, (2 if variable.trainable else 1) * variable.num_bytes))
        if readers and variable.trainable:
            first[readers[0]] = first.get(readers[0], 0.0) + variable.num_bytes
    return first, tuple(ties)


def _kept(graph: Graph, roles: Roles, unit_of: Mapping[Op, int]) -> dict[int, float]:
    """Bytes of what units make that the backward pass reads, by unit."""
    consumers = graph.consumers()
    found: dict[int, float] = {}
    for op, unit in unit_of.items():
        for tensor in op.outputs:
            if any(roles.phase[reader] == BACKWARD for reader in consumers.get(tensor, ())):
                found[unit] = found.get(unit, 0.0) + tensor.num_bytes
    return found
