"""Cost of a step in parts of a rank's batch: chunks, or microbatches.

In chunks collectives hide, and there are more starts (ATP §4.1). Take a forward pass that computes
for 10 ms and waits for collectives for 4 ms, cut into two chunks. While the second chunk computes,
the collectives of the first one, 2 ms, are in flight: they take no time of their own, and 2 ms are
saved. With four chunks it is 3 ms. A machine whose collectives hide behind only a fifth of the
compute (`Cluster.overlap` is 0.2) has 2 ms to hide behind instead of 10, and two chunks save 1 ms.

Against that stand more starts: each op of a chunk is launched, and each of its collectives started,
once for each chunk. `chunked_cost` counts both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.host import waiting_for_host
from tfpar.cost.liveness import Buffer
from tfpar.cost.memory import live_peak
from tfpar.cost.pricer import shard_bytes
from tfpar.cost.sub_batch_pricing import (
    SubBatchPricer,
    adding_seconds,
    moved_between_ranks,
    runs_in_parts,
)
from tfpar.cost.task_partition import TaskPartition
from tfpar.ir.gathered_weights import gradient_of, is_scattered_gradient, runs_for_each_microbatch
from tfpar.ir.graph import Op, Tensor, Variable, itemsize
from tfpar.ir.roles import BACKWARD, FORWARD, UPDATE, Roles
from tfpar.ir.traits import is_free
from tfpar.pipeline.statistics import EXACT, BatchStatistics
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.spec import Mesh, Spec

PhaseSeconds = tuple[float, float, float]
"""Of forward, backward and update."""


class PartSeconds(NamedTuple):
    """Seconds of a step in parts.

    Attributes:
        compute, waiting: of the ops of all parts, and of the collectives that they wait for.
        dispatch_s: in which the host issues these ops.
    """

    compute: PhaseSeconds
    waiting: PhaseSeconds
    dispatch_s: float


def hidden_by_chunks(compute_s: float, waiting_s: float, chunks: int, overlap: float) -> float:
    """Estimate the seconds that a phase saves if it is computed in chunks, one behind the other.

    Of the `chunks` equal parts of its collectives, all but the last can hide.

    Args:
        compute_s: of the ops of all chunks.
        waiting_s: of the collectives between them that are waited for, of all chunks.
        overlap: the part of the compute behind which collectives can hide (`Cluster.overlap`).
    """
    return (chunks - 1) / chunks * min(compute_s * overlap, waiting_s)


def chunked_cost(
    cost: Cost, laid: PartitionedGraph, mesh: Mesh, cluster: Cluster, roles: Roles
) -> Cost:
    """Price a step in chunks: smaller ops, more starts, hidden collectives.

    The collectives of gradients stay as they are, since gradients are first added up over chunks
    within each rank.

    Args:
        cost: of the step in one piece.
        laid: the step on `mesh` with the axis of the chunks behind its own.
    """
    chunks = laid.mesh.shape[-1]
    compute, waiting, dispatch_s = part_seconds(cost, laid, mesh, cluster, roles)
    hidden = sum(
        hidden_by_chunks(compute[phase], waiting[phase], chunks, cluster.overlap)
        for phase in (FORWARD, BACKWARD)
    )
    running = sum(compute) + sum(waiting) + cost.exposed_s - hidden
    host_wait_s = waiting_for_host(dispatch_s, running)
    return dataclasses.replace(
        cost,
        seconds=running + host_wait_s + cluster.step_s,
        compute_s=compute,
        communication_s=waiting,
        hidden_s=hidden,
        host_wait_s=host_wait_s,
    )


def part_seconds(
    cost: Cost,
    laid: PartitionedGraph,
    mesh: Mesh,
    cluster: Cluster,
    roles: Roles,
    statistics: BatchStatistics = EXACT,
    again: Collection[Op] = (),
) -> PartSeconds:
    """Price ops, and the collectives that they wait for, that run on parts of a rank's batch one
    behind the other; arguments as of `chunked_cost`.

    Args:
        statistics: of the batch, those that each part has of its own.
        again: ops that each part runs although all of them give the same.
    """
    pricer = SubBatchPricer(laid.mesh, cluster, roles, mesh)
    terms, parts, rules = pricer.zero(), laid.mesh.shape[-1], laid.prepared.rules
    for op, decision in laid.decisions.items():
        if not is_free(op):
            each = runs_in_parts(decision) or op in statistics.each
            times = roles.times.get(op, 1) * (parts if each else 1)
            pricer.add_compute(terms, op, rules[op], decision, roles.phase[op], times)
    for moved, axes, each in moved_between_ranks(laid, roles):
        own, phase = each or moved.op in statistics.sums or moved.op in again, roles.phase[moved.op]
        times = roles.times.get(moved.op, 1) * (parts if own else 1)
        terms.compute[phase] += times * pricer.cut_seconds(moved)
        pricer.add_collective(terms, moved, axes, phase, times)
    compute, (waiting, _) = terms.compute.tolist(), pricer.wait(terms)
    return PartSeconds(
        (compute[FORWARD], compute[BACKWARD], cost.compute_s[UPDATE]),
        (waiting[FORWARD], waiting[BACKWARD], cost.communication_s[UPDATE]),
        float(terms.dispatch.sum()),
    )


# --- microbatches ---------------------------------------------------------------------------


def microbatched_cost(
    cost: Cost,
    laid: PartitionedGraph,
    mesh: Mesh,
    cluster: Cluster,
    roles: Roles,
    statistics: BatchStatistics = EXACT,
) -> Cost:
    """Price a step in microbatches: smaller products, more collectives, fewer activations.

    Gradients are summed over microbatches before they are over ranks: they travel once, when the
    backward pass is over, and hide behind nothing. Those of which ranks store a part each travel
    for each microbatch, and hide behind its backward pass as in one piece. Sums are stored from the
    beginning on, besides the activations of one microbatch; where microbatches join, all of them
    have theirs stored that are read after it.

    Args:
        cost: of the step in one piece.
        laid: the step on `mesh` with the axis of the microbatches behind its own.
        statistics: of the batch, those that each microbatch has of its own.
    """
    again = frozenset(filter(runs_for_each_microbatch, laid.graph.ops))
    compute, waiting, dispatch_s = part_seconds(cost, laid, mesh, cluster, roles, statistics, again)
    step = TaskPartition(laid, roles, dict.fromkeys(laid.graph.ops, 0), 1, statistics=statistics)
    pricer = _WithJoins(step, cluster)
    moved = [c for c in laid.communications(roles.wire_dtypes) if c.op in step.runs.each]
    adding = sum(adding_seconds(one, pricer, statistics) for one in moved)
    compute = compute[0], compute[1] + step.microbatches * adding, compute[2]
    most = live_peak(laid, pricer, cost.bucket_bytes, show=0)
    kept = [b for b in step.joined if roles.phase[b[0].op] == FORWARD and _is_read_back(b, step)]
    others = sum(map(pricer.of_others, kept))
    sums_bytes, scattered = _gradient_sums(cost, laid, roles)
    each_s = scattered * cost.gradients_s
    gradients_s = cost.gradients_s + (step.microbatches - 1) * each_s
    hideable_s = cluster.overlap * compute[BACKWARD]
    hidden_s = min(hideable_s, step.microbatches * scattered * (cost.gradients_s - cost.exposed_s))
    exposed_s = gradients_s - hidden_s
    running = sum(compute) + sum(waiting) + exposed_s
    host_wait_s = waiting_for_host(dispatch_s, running)
    return dataclasses.replace(
        cost,
        seconds=running + host_wait_s + cluster.step_s,
        compute_s=compute,
        communication_s=waiting,
        gradients_s=gradients_s,
        exposed_s=exposed_s,
        hidden_s=0.0,
        host_wait_s=host_wait_s,
        activation_bytes=cost.activation_bytes / step.microbatches + others,
        copied_bytes=cost.copied_bytes / step.microbatches,
        host_activation_bytes=cost.host_activation_bytes / step.microbatches,
        gradient_bytes=sums_bytes,
        live_bytes=sums_bytes + most.num_bytes,
    )


def _gradient_sums(cost: Cost, laid: PartitionedGraph, roles: Roles) -> tuple[float, float]:
    """Return the bytes of the sums of gradients that a rank stores, and the share of gradients that
    are scattered before they are added up.

    Args:
        cost: of the step in one piece: as many bytes as weights.
    """
    stored, scattered = cost.gradient_bytes, 0.0
    specs = {v.name: (v, laid.variable_specs[v]) for v in laid.graph.variables}
    for op in filter(is_scattered_gradient, laid.graph.ops):
        variable, spec = specs[gradient_of(op)]
        shape, item = tuple(variable.shape), itemsize(variable.dtype)
        whole = shard_bytes(shape, item, spec, laid.mesh)
        own = shard_bytes(shape, item, laid.specs[op.outputs[0]], laid.mesh)
        times = roles.times.get(variable.handle.op, 1)
        stored += times * (own - whole)
        scattered += times * own
    return stored, scattered / stored if stored else 0.0


def _is_read_back(buffer: Buffer, step: TaskPartition) -> bool:
    return any(kind != "F" for _, kind in step.users[buffer])


class OneMicrobatch(SubBatchPricer):
    """Pricer of one microbatch, without the sums of gradients: a gradient is added to its sum as
    soon as it is there."""

    def stored(self, tensor: Tensor | Variable, spec: Spec) -> float:
        if tensor in self.roles.deferrable:
            return 0.0
        return super().stored(tensor, spec)


class _WithJoins(OneMicrobatch):
    """The same, and what other microbatches store of what is read after a join."""

    def __init__(self, step: TaskPartition, cluster: Cluster) -> None:
        super().__init__(step.laid.mesh, cluster, step.roles)
        self._step = step

    def stored(self, tensor: Tensor | Variable, spec: Spec) -> float:
        own = super().stored(tensor, spec)
        return own * self._step.microbatches if (tensor, spec) in self._step.joined else own

    def of_others(self, buffer: Buffer) -> float:
        """Find what other microbatches store of a buffer that is read after a join."""
        others = (self._step.microbatches - 1) / self._step.microbatches
        return others * self.stored(*buffer)
