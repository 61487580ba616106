"""What a step costs that runs in microbatches."""

from __future__ import annotations

import dataclasses

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.memory import live_peak
from tfpar.cost.overlap import part_seconds
from tfpar.cost.parts import PartPricer
from tfpar.cost.step_in_stages import StepInStages
from tfpar.ir.graph import Tensor, Variable
from tfpar.ir.roles import Roles
from tfpar.pipeline.statistics import EXACT, BatchStatistics
from tfpar.propagation.partitioned import PartitionedGraph
from tfpar.spec import Mesh, Spec


def microbatched_cost(
    cost: Cost,
    laid: PartitionedGraph,
    mesh: Mesh,
    cluster: Cluster,
    roles: Roles,
    statistics: BatchStatistics = EXACT,
) -> Cost:
    """`cost` for a step in microbatches: smaller products, more collectives, fewer activations.

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
    pricer = OneMicrobatch(laid.mesh, cluster, roles)
    most = live_peak(laid, pricer, cost.bucket_bytes, show=0)
    step = StepInStages(laid, roles, dict.fromkeys(laid.graph.ops, 0), 1, statistics=statistics)
    others = (step.microbatches - 1) * sum(pricer.stored(*buffer) for buffer in step.joined)
    return dataclasses.replace(
        cost,
        seconds=sum(compute) + sum(waiting) + cost.gradients_s + cluster.step_s,
        compute_s=compute,
        communication_s=waiting,
        exposed_s=cost.gradients_s,
        hidden_s=0.0,
        activation_bytes=cost.activation_bytes / step.microbatches + others,
        live_bytes=cost.gradient_bytes + most.num_bytes + others,
    )


class OneMicrobatch(PartPricer):
    """What a rank stores besides the sums of gradients: a gradient of one microbatch is added to
    its sum as soon as it is there."""

    def stored(self, tensor: Tensor | Variable, spec: Spec) -> float:
        if tensor in self.roles.deferrable:
            return 0.0
        return super().stored(tensor, spec)
