"""Pricing of a step whose last mesh axis lies within a rank: chunks or microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.cost.pricer import Pricer
from tfpar.ir.gathered_weights import runs_for_each_microbatch
from tfpar.ir.graph import Op, Tensor
from tfpar.ir.roles import Roles
from tfpar.ir.traits import SOURCES
from tfpar.pipeline.statistics import EXACT, BatchStatistics
from tfpar.pipeline.step_graph import Runs
from tfpar.propagation.partitioned_graph import Decision, PartitionedGraph
from tfpar.propagation.reshard import Communication, lower_reshard
from tfpar.spec import Mesh, Replicate, Shard, Spec


class SubBatchPricer(Pricer):
    """Pricer of a step in parts of a rank's batch; parts are no ranks of their own.

    Args:
        mesh: with the axis of the parts behind those of ranks.
        ranks: without it; by default as `mesh` has them.
        beside: the ranks of all actors whose collectives share links, rank by rank of each; by
            default those of `cluster` alone.
    """

    def __init__(
        self,
        mesh: Mesh,
        cluster: Cluster,
        roles: Roles,
        ranks: Mesh | None = None,
        beside: Cluster | None = None,
    ) -> None:
        super().__init__(mesh, cluster, roles)
        self.ranks = mesh.without_last_axis() if ranks is None else ranks
        if beside is not None and beside.size > self.ranks.size:
            self.ranks = self.ranks.with_axis("actors beside", beside.size // self.ranks.size)
            self.linked = beside

    def alike(self, *specs: Spec) -> int:
        found = super().alike(*specs)
        if self.cluster.one_memory and all(isinstance(spec[-1], Replicate) for spec in specs):
            found //= self.mesh.shape[-1]
        return found


class SubBatchCollective(NamedTuple):
    """Collective of a step in parts.

    Attributes:
        axes: those of ranks that it goes over.
        each: whether it runs once for each part; else once for all.
    """

    communication: Communication
    axes: tuple[int, ...]
    each: bool


def moved_between_ranks(laid: PartitionedGraph, roles: Roles) -> Iterator[SubBatchCollective]:
    """List the collectives of a step in parts that cross ranks; what parts exchange moves
    nothing."""
    for communication in laid.communications(roles.wire_dtypes):
        moved = without_parts(communication, laid.mesh)
        if moved is not None:
            yield moved


def without_parts(communication: Communication, mesh: Mesh) -> SubBatchCollective | None:
    """Take the axis of the parts out of a collective; None if it stays within each rank.

    Args:
        mesh: with the axis of the parts behind those of ranks.
    """
    part = mesh.num_axes - 1
    axes = tuple(axis for axis in communication.axes if axis != part)
    each = not isinstance(communication.step.after[part], Replicate)
    return SubBatchCollective(communication, axes, each) if axes else None


# --- runs of ops in microbatches ------------------------------------------------------------
# Read off the specs of a step whose last mesh axis are microbatches.


def count_runs(laid: PartitionedGraph, roles: Roles, statistics: BatchStatistics = EXACT) -> Runs:
    """Find what runs once for each microbatch, and which of it needs all of them.

    One microbatch is the whole batch: it waits for no others.

    Args:
        laid: the step on a mesh with the axis of the microbatches behind its own.
        statistics: those that each microbatch has of its own.
    """
    if laid.mesh.shape[-1] == 1:
        return Runs.without_joins(laid.graph, roles)
    return _runs(laid, statistics)


def _runs(laid: PartitionedGraph, statistics: BatchStatistics = EXACT) -> Runs:
    each = {
        op
        for op, decision in laid.decisions.items()
        if runs_in_parts(decision) and op.type not in SOURCES
    }
    each |= statistics.each
    each |= set(filter(runs_for_each_microbatch, laid.decisions))
    met = set()
    for op, decision in laid.decisions.items():
        for position, tensor in enumerate(op.inputs):
            maker = laid.decisions.get(tensor.op)
            if maker is not None and tensor.op not in statistics.sums:
                made = maker.strategy.out_specs[tensor.index]
                if _joins(tensor, made, decision.strategy.in_specs[position], laid.mesh):
                    met.add((op, position))
        if decision.expansion is not None and op not in statistics.sums:
            met |= {(op, position) for position in _met_within(decision.expansion)}
    return Runs(frozenset(each), frozenset(met))


def _joins(tensor: Tensor, made: Spec, read: Spec, mesh: Mesh) -> bool:
    """Whether reading one part of a tensor needs all of its parts to be made.

    The two specs may place the parts differently, and still mean the same entries on each rank:
    where another axis moves, a split behind it is named anew (`spec.nesting`). So the steps between
    them decide.
    """
    own, wanted = made[-1], read[-1]
    if own == wanted or isinstance(own, Replicate):
        return False
    if not (isinstance(own, Shard) and isinstance(wanted, Shard)):
        return True
    steps = lower_reshard(tuple(tensor.shape or ()), made, read, mesh)
    return any(len(made) - 1 in step.axes for step in steps)


def _met_within(expansion: PartitionedGraph) -> set[int]:
    """The inputs of which an op needs all microbatches while it runs for each: its decomposition
    adds up what is made of them, and goes on with that."""
    runs = _runs(expansion)
    read: dict[Op, set[int]] = {t.op: {i} for i, t in enumerate(expansion.graph.inputs)}
    awaited: dict[Op, set[int]] = {}
    found: set[int] = set()
    for op in expansion.graph.ops:
        own, others = read.setdefault(op, set()), awaited.setdefault(op, set())
        for position, tensor in enumerate(op.inputs):
            (others if (op, position) in runs.met else own).update(read[tensor.op])
            others |= awaited[tensor.op]
        if op in runs.each:
            found |= others
    return found


def runs_in_parts(decision: Decision) -> bool:
    """Whether an op that runs so does once for each part of the batch."""
    specs = (*decision.strategy.in_specs, *decision.strategy.out_specs)
    return any(not isinstance(spec[-1], Replicate) for spec in specs)


# --- sums over microbatches -----------------------------------------------------------------
# Each adds its part to the sum so far, in the task that makes it (`compile.local.task_body`), which
# reads both and writes a sum.

_SUMMED = ("all_reduce", "reduce_scatter")
_PASSES = 3


def adding_seconds(
    communication: Communication, pricer: Pricer, statistics: BatchStatistics
) -> float:
    """Price the adding of one microbatch's part to the sum that a collective over all of them
    makes; 0 of other collectives.

    Args:
        pricer: of the mesh with the axis of the microbatches behind those of ranks.
        statistics: of the batch, those that each microbatch has of its own.
    """
    step, op, tensor = communication.step, communication.op, communication.tensor
    micro, device = pricer.mesh.num_axes - 1, pricer.cluster.device
    if tensor is None or step.kind not in _SUMMED or micro not in step.axes:
        return 0.0
    if not isinstance(step.after[micro], Replicate) or op in statistics.sums:
        return 0.0
    moved = _PASSES * pricer.local_bytes(tensor, step.before) / pricer.alike(step.before)
    return pricer.roles.times.get(op, 1) * (device.launch_s + moved / device.memory_bandwidth)
