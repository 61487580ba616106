"""Cost of a step in microbatches."""

from __future__ import annotations

import dataclasses

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.liveness import Buffer
from tfpar.cost.memory import live_peak
from tfpar.cost.overlap import part_seconds
from tfpar.cost.running_sums import adding_seconds
from tfpar.cost.sub_batch_pricing import SubBatchPricer
from tfpar.cost.task_partition import TaskPartition
from tfpar.ir.graph import Tensor, Variable
from tfpar.ir.roles import FORWARD, Roles
from tfpar.pipeline.statistics import EXACT, BatchStatistics
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.spec import Mesh, Spec


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
    backward pass is over, and hide behind nothing. Their sums are stored from the beginning on,
    besides the activations of one microbatch; where microbatches join, all of them have theirs
    stored that are read after it.

    Args:
        cost: of the step in one piece.
        laid: the step on `mesh` with the axis of the microbatches behind its own.
        statistics: of the batch, those that each microbatch has of its own.
    """
    compute, waiting = part_seconds(cost, laid, mesh, cluster, roles, statistics)
    step = TaskPartition(laid, roles, dict.fromkeys(laid.graph.ops, 0), 1, statistics=statistics)
    pricer = _WithJoins(step, cluster)
    moved = [c for c in laid.communications(roles.wire_dtypes) if c.op in step.runs.each]
    adding = sum(adding_seconds(one, pricer, statistics) for one in moved)
    compute = compute[0], compute[1] + step.microbatches * adding, compute[2]
    most = live_peak(laid, pricer, cost.bucket_bytes, show=0)
    kept = [b for b in step.joined if roles.phase[b[0].op] == FORWARD and _is_read_back(b, step)]
    others = sum(map(pricer.of_others, kept))
    return dataclasses.replace(
        cost,
        seconds=sum(compute) + sum(waiting) + cost.gradients_s + cluster.step_s,
        compute_s=compute,
        communication_s=waiting,
        exposed_s=cost.gradients_s,
        hidden_s=0.0,
        activation_bytes=cost.activation_bytes / step.microbatches + others,
        copied_bytes=cost.copied_bytes / step.microbatches,
        host_activation_bytes=cost.host_activation_bytes / step.microbatches,
        live_bytes=cost.gradient_bytes + most.num_bytes,
    )


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
