"""Pricing of a step whose last mesh axis lies within a rank: chunks or microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.cost.pricer import Pricer
from tfpar.ir.roles import Roles
from tfpar.propagation.communication import Communication
from tfpar.propagation.partitioned_graph import PartitionedGraph
from tfpar.spec import Mesh, Replicate, Spec


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
