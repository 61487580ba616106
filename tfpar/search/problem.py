"""What a planner is asked, and what any planner is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from tfpar.constraints import Constraint
from tfpar.cost.cluster import Cluster
from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.spec import Mesh, Replicate, Shard, Spec

if TYPE_CHECKING:
    from tfpar.plan import Plan

Progress = Callable[[str, int], None]
"""Told of a search: (what is being searched, plans priced so far)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A step to plan.

    Attributes:
        graph: what is searched; see `planning_graph`.
        stand_ins: ops of it that cost nothing.
        mesh: the physical shape of the ranks. Without constraints a planner may lay other axes
            over them; with some, which name its axes, it is the mesh.
        cluster: the machines.
        constraints: what the user fixed.
        batched: the inputs whose first dim is the batch.
        state_ratio: bytes of optimizer slots per byte of weight; None if the graph holds the
            update itself.
        fingerprint: of the step; see `ir.fingerprint`.
    """

    graph: Graph
    mesh: Mesh
    cluster: Cluster
    batched: frozenset[Tensor]
    fingerprint: str
    stand_ins: frozenset[Op] = frozenset()
    constraints: tuple[Constraint, ...] = ()
    state_ratio: float | None = None
    progress: Progress | None = None


def input_spec(batched: bool, mesh: Mesh, axes: Sequence[int]) -> Spec:
    """The spec of a step's input: a batch is split over mesh axes `axes`, the rest is whole."""
    return tuple(Shard(0) if batched and a in axes else Replicate() for a in range(mesh.num_axes))


class Planner(Protocol):
    """Finds a plan. `name` is how users choose it."""

    name: str

    def solve(self, problem: Problem) -> Plan:
        """The best plan that this planner finds for `problem`.

        Raises:
            PlanError: no plan satisfies the constraints.
        """
        ...
