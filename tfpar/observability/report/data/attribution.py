"""Attribution of a step's time, memory and collectives to layers.

Every op, collective and tensor belongs to a layer, and is priced by itself as planners price it.
What these add up to is no step yet: collectives are packed, ops run in parts on microbatches, and a
stage has what its simulation says. So the layers' seconds are scaled, phase by phase, to those of
the plan (of each stage, where there are some), and their bytes to what it says that a rank stores.
In a step that runs in one piece the factors are 1, but for what packing saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from tfpar.cost.memory import live_peak
from tfpar.cost.packing_gain import PackingKey
from tfpar.cost.pricer import Pricer, VariableBytes, shard_bytes
from tfpar.cost.terms import in_buckets_of
from tfpar.ir.graph import Graph, Op, Variable, itemsize
from tfpar.ir.graph_nodes import GraphNode, NodeGraph
from tfpar.ir.roles import BACKWARD, FORWARD, PHASES, Roles, When
from tfpar.observability.report.data.schema import Collective, Phase
from tfpar.observability.report.data.schema import When as MovedWhen
from tfpar.observability.report.data.step_layouts import StepLayouts
from tfpar.plans import Plan
from tfpar.propagation.follow import followed_weights
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.propagation.reshard import Communication
from tfpar.spec import Spec

ALL_TENSORS = 10**9


@dataclasses.dataclass(frozen=True, eq=False)
class LayerAttribution:
    """Shares of layers in a step, a row each in the order of `nodes`; 0 where nothing was priced.

    Attributes:
        compute: seconds, a column for each phase.
        waiting: seconds of collectives, as far as they are waited for, likewise.
        weights, slots, live, kept: bytes.
        collectives: of all layers, those that are equal merged.
    """

    compute: np.ndarray
    waiting: np.ndarray
    weights: np.ndarray
    slots: np.ndarray
    live: np.ndarray
    kept: np.ndarray
    collectives: tuple[Collective, ...]


def layer_of_op(graph: Graph, nodes: NodeGraph, roles: Roles) -> dict[Op, int]:
    """The row of each op's layer; constants of no scope go with what comes before them.

    Along a residual stream a tape adds a gradient for each layer that reads it, in ops without a
    scope. Each of them is of the layer whose gradient it adds, its last term, and not of the one
    where the stream ends, which its name tells no better.
    """
    rows = {node: row for row, node in enumerate(nodes.nodes)}
    found: dict[Op, int] = {}
    last = 0
    for op in graph.ops:
        node = nodes.node_of.get(op)
        last = last if node is None else rows[node]
        if roles.phase[op] == BACKWARD and op.inputs and not op.scope:
            last = found[op.inputs[-1].op]
        found[op] = last
    return found


def stage_of_layer(plan: Plan, nodes: NodeGraph, roles: Roles) -> list[int | None]:
    """The stage of each layer; that of most of its forward ops."""
    if plan.stages is None or not plan.stages.scopes:
        return [None] * len(nodes.nodes)
    forward = [op for node in nodes.nodes for op in node.ops if roles.phase[op] == FORWARD]
    stages = plan.stages.forward_stages(forward)
    found: list[int | None] = []
    for node in nodes.nodes:
        own = [stages[op] for op in node.ops if op in stages]
        before = found[-1] if found else 0
        found.append(max(set(own), key=own.count) if own else before)
    return found


def shares_of(
    plan: Plan,
    laid: StepLayouts,
    roles: Roles,
    nodes: NodeGraph,
    stages: list[int | None],
    paths: Mapping[GraphNode, str],
) -> LayerAttribution:
    """Attribute a step's time, memory and collectives to its layers, each in its stage's layout.

    Args:
        stages: of the layers.
        paths: what they are called.
    """
    raw = _Raw(plan, laid.partitioned[0], roles, nodes)
    numbers = np.array([laid.number_of(stage) for stage in stages])
    for number in {*numbers} - {0}:
        other = _Raw(plan, laid.partitioned[number], roles, nodes, laid.first_actor(number))
        raw.take(other, numbers == number)
    if raw.pricer is not None and plan.cost is not None:
        _scale_to(plan, raw, stages)
    return LayerAttribution(
        raw.compute,
        raw.waiting,
        raw.weights,
        raw.slots,
        raw.live,
        raw.kept,
        raw.collectives([paths[node] for node in nodes.nodes]),
    )


@dataclasses.dataclass(eq=False)
class _Moved:
    """A collective, and the row of the layer whose tensor it moves."""

    communication: Communication
    axes: tuple[str, ...]
    row: int
    phase: int
    when: When
    alone_s: float = 0.0
    seconds: float = 0.0


class _Raw:
    """Cost of each layer by itself, before it is scaled to the cost of the step.

    Args:
        partitioned: the step in the layout of some actors.
        actor: one of these, whose machines stand for all of them.
    """

    def __init__(
        self,
        plan: Plan,
        partitioned: PartitionedGraph,
        roles: Roles,
        nodes: NodeGraph,
        actor: int = 0,
    ) -> None:
        roles = dataclasses.replace(roles, wire_dtypes=partitioned.wire_dtypes)
        self.partitioned, self.roles, self.mesh = partitioned, roles, partitioned.mesh
        count = len(nodes.nodes)
        self.row = layer_of_op(partitioned.graph, nodes, roles)
        self.compute, self.between = np.zeros((count, 3)), np.zeros((count, 3))
        self.beside, self.exposed = np.zeros(count), np.zeros(count)
        self.weights, self.slots = np.zeros(count), np.zeros(count)
        self.live, self.kept = np.zeros(count), np.zeros(count)
        self.moved = [
            _Moved(
                found,
                tuple(self.mesh.axis_names[axis] for axis in found.axes),
                self.row[found.op],
                roles.phase[found.op],
                found.when(roles),
            )
            for found in partitioned.communications(roles.wire_dtypes)
        ]
        self.pricer = None
        if plan.cluster is not None:
            stage_ranks = plan.cluster
            if plan.stages is not None:
                stage_ranks = plan.cluster.part(plan.stages.groups(plan.mesh.size)[actor])
            self.pricer = Pricer(partitioned.mesh, stage_ranks, roles)
            self._price(self.pricer, plan)
        else:
            self._store_variables(self._shard)

    def take(self, other: _Raw, rows: np.ndarray) -> None:
        """Take some layers from another layout of the step."""
        for name in ("compute", "between", "beside", "exposed", "weights", "slots", "live", "kept"):
            getattr(self, name)[rows] = getattr(other, name)[rows]
        self.moved = [one for one in self.moved if not rows[one.row]]
        self.moved += [one for one in other.moved if rows[one.row]]

    @property
    def waiting(self) -> np.ndarray:
        """Seconds of collectives that are waited for."""
        found: np.ndarray = self.between.copy()
        found[:, BACKWARD] += self.exposed
        return found

    def _price(self, pricer: Pricer, plan: Plan) -> None:
        rules = self.partitioned.prepared.rules
        for op, decision in self.partitioned.decisions.items():
            terms = pricer.zero()
            pricer.add_op(terms, op, rules[op], decision)
            self.compute[self.row[op]] += terms.compute
            self.kept[self.row[op]] += terms.activation_bytes
        bucket = plan.cost.bucket_bytes if plan.cost is not None and plan.cost.bucket_bytes else 0
        for one in self.moved:
            one.alone_s = pricer.seconds(one.communication)
            if one.communication.tensor is not None:
                self.compute[one.row, one.phase] += pricer.cut_seconds(one.communication)
        self._pack(pricer, bucket)
        for one in self.moved:
            if one.when is When.BESIDE:
                self.beside[one.row] += one.seconds
            else:
                self.between[one.row, one.phase] += one.seconds
        self._store_variables(
            lambda variable, spec: pricer.stored_bytes(
                variable, spec, 1.0, self.partitioned.slots_spec(variable)
            )
        )
        most = live_peak(self.partitioned, pricer, bucket, None, ALL_TENSORS)
        ops = {op.name: self.row[op] for op in self.partitioned.graph.ops}
        for name, size in most.largest:
            self.live[ops[name.rpartition(":")[0]]] += size

    def _pack(self, pricer: Pricer, bucket: int) -> None:
        """Scale collectives to their times when packed; each gets its part of the packed one."""
        whole, sets = pricer.zero(), [self._packed_with(one) for one in self.moved]
        alone: dict[Hashable, float] = {}
        for one, packed_with in zip(self.moved, sets, strict=True):
            found = one.communication
            pricer.add_collective(whole, found, found.axes, one.phase, 1)
            alone[packed_with] = alone.get(packed_with, 0.0) + one.alone_s
        taken: dict[Hashable, float] = {
            packable: pricer.collective_seconds(packable.kind, packable.axes, num_bytes)
            for packable, (_, num_bytes, _) in whole.together.items()
        }
        for when in (When.BESIDE, When.AFTER):
            for packed in whole.packed(when):
                seconds = pricer.collective_seconds(*packed)
                if bucket:
                    seconds, _ = in_buckets_of(bucket, packed, self.mesh, pricer.cluster)
                taken[when, packed.kind, packed.axes] = seconds
        for one, packed_with in zip(self.moved, sets, strict=True):
            one.seconds = one.alone_s
            if packed_with is not None and one.alone_s:
                one.seconds *= taken.get(packed_with, 0.0) / alone[packed_with]

    def _packed_with(self, one: _Moved) -> Hashable:
        """Return the key of the collectives that this one is packed with; None if it runs alone."""
        found = one.communication
        if one.when is not When.BETWEEN:
            return one.when, found.kind, tuple(sorted(found.axes))
        return PackingKey.of(found, self.roles, found.axes, one.phase, 1)

    def _store_variables(self, stored_of: Callable[[Variable, Spec], VariableBytes]) -> None:
        """Add the persistent bytes of variables; slots count for the layer of their weights."""
        graph, partitioned = self.partitioned.graph, self.partitioned
        follows = followed_weights(graph, partitioned.prepared.rules)
        slots_known = bool(follows)
        rows = {v: self.row_of(v) for v in graph.variables}
        for variable, spec in partitioned.variable_specs.items():
            link = follows.get(variable)
            row = rows[link[0] if link is not None else variable]
            stored = stored_of(variable, spec)
            self.weights[row] += stored.weight
            if not variable.trainable or not slots_known:
                self.slots[row] += stored.state

    def _shard(self, variable: Variable, spec: Spec) -> VariableBytes:
        """Return a rank's bytes of a variable, where no cluster is known."""
        item = itemsize(variable.dtype)
        size = shard_bytes(tuple(variable.shape), item, spec, self.mesh)
        return VariableBytes(size) if variable.trainable else VariableBytes(state=size)

    def row_of(self, variable: Variable) -> int:
        """The layer of a variable: that of the first op that reads it."""
        consumers = self.partitioned.prepared.consumers
        readers = consumers.get(variable.handle, ())
        forward = [op for op in readers if self.roles.phase[op] == FORWARD]
        return self.row[(forward or readers or [variable.handle.op])[0]]

    def collectives(self, paths: list[str]) -> tuple[Collective, ...]:
        """Merge the collectives of a step that are equal in kind, axes, layer and time."""
        alike: dict[tuple[object, ...], list[_Moved]] = {}
        for one in self.moved:
            found = one.communication
            key = found.kind, one.axes, one.row, one.phase, one.when
            alike.setdefault(key, []).append(one)
        return tuple(
            Collective(
                kind=found[0].communication.kind,
                axes=found[0].axes,
                layer=paths[found[0].row],
                phase=_PHASES[found[0].phase],
                when=_WHEN[found[0].when],
                count=len(found),
                num_bytes=sum(one.communication.num_bytes for one in found),
                seconds=float(sum(one.seconds for one in found)),
                alone_s=sum(one.alone_s for one in found),
            )
            for found in alike.values()
        )

    def waited_for(self, rows: np.ndarray, phase: int) -> Iterator[_Moved]:
        """The collectives of some layers that ops of a phase wait for."""
        for one in self.moved:
            if rows[one.row] and one.phase == phase and one.when is not When.BESIDE:
                yield one

    def in_flight(self, rows: np.ndarray) -> Iterator[_Moved]:
        """Return the collectives of some layers that run beside the backward pass."""
        return (one for one in self.moved if rows[one.row] and one.when is When.BESIDE)


_PHASES: Sequence[Phase] = ("forward", "backward", "update")
_WHEN: Mapping[When, MovedWhen] = {
    When.BETWEEN: "between",
    When.BESIDE: "beside",
    When.AFTER: "after",
}


def _scale_to(plan: Plan, raw: _Raw, stages: list[int | None]) -> None:
    """Scale to what the plan says of a step, or of each of its stages."""
    assert plan.cost is not None
    cost, every = plan.cost, np.ones(len(raw.weights), bool)
    staged = None if plan.stages is None else plan.stages.cost
    if plan.stages is None or staged is None or None in stages:
        for phase in range(len(PHASES)):
            _scale(raw.compute[:, phase], cost.compute_s[phase], raw.weights)
            factor = _scale(raw.between[:, phase], cost.communication_s[phase], raw.weights)
            _slow_down(raw.waited_for(every, phase), factor)
        _scale_gradients(raw, every, cost.gradients_s, cost.exposed_s)
        _scale(raw.weights, cost.weight_bytes)
        _scale(raw.slots, cost.state_bytes)
        _scale(raw.live, cost.memory_bytes - cost.weight_bytes - cost.state_bytes)
        return
    own = np.array(stages)
    step_s = 0.0 if plan.cluster is None else plan.cluster.step_s
    fullest = plan.stages.schedule.actors[staged.fullest]
    for actor in range(plan.stages.num_actors):
        on_actor = plan.stages.schedule.stages_of(actor)
        busy = 0.0
        for stage in on_actor:
            share, rows = staged.stages[stage], own == stage
            seconds = plan.microbatches * share.forward_s, plan.microbatches * share.backward_s
            for phase, target in enumerate((*seconds, share.update_s)):
                busy += target
                both = raw.compute[rows, phase].sum() + raw.between[rows, phase].sum()
                factor = target / both if both else 0.0
                raw.compute[rows, phase] *= factor
                raw.between[rows, phase] *= factor
                _slow_down(raw.waited_for(rows, phase), factor)
                if not both:
                    _spread(raw.compute[:, phase], rows, target, raw.weights)
        rows = np.isin(own, on_actor)
        reduction = sum(staged.stages[stage].reduction_s for stage in on_actor)
        slack = max(0.0, cost.seconds - step_s - busy)
        _scale_gradients(raw, rows, reduction, min(reduction, slack))
        if actor == fullest and raw.slots[rows].sum():
            raw.slots *= cost.state_bytes / raw.slots[rows].sum()
    for actor in range(plan.stages.num_actors):
        on_actor = plan.stages.schedule.stages_of(actor)
        rows = np.isin(own, on_actor)
        stored = raw.weights[rows].sum() + raw.slots[rows].sum()
        peak = max(staged.stages[stage].peak_bytes for stage in on_actor)
        live = raw.live[rows]
        _scale(live, max(0.0, peak - stored), raw.weights[rows])
        raw.live[rows] = live


def _slow_down(moved: Iterable[_Moved], factor: float) -> None:
    """Have collectives take so many times as long."""
    for one in moved:
        one.seconds *= factor


def _scale_gradients(raw: _Raw, rows: np.ndarray, seconds: float, exposed_s: float) -> None:
    """Scale the gradient sums of some layers to given seconds, and the exposed part of them."""
    total = raw.beside[rows].sum()
    factor = seconds / total if total else 0.0
    _slow_down(raw.in_flight(rows), factor)
    if total:
        raw.exposed[rows] = raw.beside[rows] * (exposed_s / total)
    raw.beside[rows] *= factor


def _scale(values: np.ndarray, total: float, like: np.ndarray | None = None) -> float:
    """Scale values, in place, to a sum; where all are 0, it is spread as `like`."""
    now = float(values.sum())
    if now:
        values *= total / now
        return total / now
    if total:
        _spread(values, np.ones(len(values), bool), total, values if like is None else like)
    return 1.0


def _spread(values: np.ndarray, rows: np.ndarray, total: float, like: np.ndarray) -> None:
    weights = np.where(rows, like, 0.0)
    if not weights.sum():
        weights = rows.astype(float)
    if weights.sum():
        values += total * weights / weights.sum()
