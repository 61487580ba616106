"""`StrategyProblem`: the model, cluster and batch that 3-D strategies are priced for."""

from __future__ import annotations

import dataclasses

from tfpar.cluster.description import Cluster
from tfpar.planning.inter_op.three_d.cost_table import LayerCostTable
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.spec import PlanError


@dataclasses.dataclass(frozen=True)
class StrategyProblem:
    """Problem of a strategy search: the costs of a model's layers, the cluster, and the batch.

    Attributes:
        batch: samples of a step, of all copies together.
        most_virtual: stages that an actor may have.
    """

    table: LayerCostTable
    cluster: Cluster
    batch: int
    most_virtual: int = 8

    @property
    def can_offload_slots(self) -> bool:
        """Whether slots of the optimizer can lie in memory that is not the devices'."""
        return self.table.can_offload_slots and not self.cluster.in_host_memory

    def microbatches(self, strategy: Strategy3D) -> tuple[int, ...]:
        """Return the number of microbatches of each copy.

        Raises:
            PlanError: the strategy does not fit the model.
        """
        if sum(strategy.counts) != len(self.table):
            raise PlanError(
                f"The stages have {sum(strategy.counts)} layers, the model has {len(self.table)}."
            )
        if max(strategy.ranks) >= self.cluster.size:
            raise PlanError(
                f"The placement has rank {max(strategy.ranks)}, but cluster {self.cluster.name!r} "
                f"has {self.cluster.size} devices."
            )
        return strategy.microbatches(self.batch)
