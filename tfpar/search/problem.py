"""What a planner is asked, and what any planner is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.ir.graph import Graph, Op, Tensor, Variable
from tfpar.pipeline.statistics import BatchStatisticsOf
from tfpar.plans import Plan
from tfpar.propagation.partitioned import Anchors
from tfpar.search.meshes import LogicalMesh, input_spec
from tfpar.search.objective import Budget, Objective
from tfpar.search.so_far import Offer
from tfpar.spec import Spec, replicated

Progress = Callable[[str, int], None]
"""Told of a search: (what is being searched, plans priced so far)."""


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A spec that is given, and by what."""

    spec: Spec
    why: str


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A step to plan.

    Attributes:
        graph: what is searched; see `planning_graph`.
        stand_ins: ops of it that cost nothing.
        meshes: the logical meshes to choose from; see `search.meshes`.
        cluster: the machines.
        batched: the inputs whose first dim is the batch.
        fingerprint: of the step; see `ir.fingerprint`.
        variables: all of the step, slots that `graph` lacks included.
        fixed: specs of variables that are given, by name; those of border tensors are `tensors`.
        constraints: what the user asked for, as text.
        state_ratio: bytes of optimizer slots per byte of weight; None if the graph holds the
            update itself.
        compression: the dtype in which gradients travel; None: their own.
        recompute: what to compute again in the backward pass (see `search.recompute`): every
            block that repeats, none, those that patterns name, or (None) what memory asks for.
        microbatches: in which a rank computes its part of a training batch.
        batch_statistics: what normalisations take them over; see `pipeline.Pipeline`.
        objective: what makes a plan the better one.
        budget: what the search may take.
        progress: is told of the search.
        offer: is told of each better plan on the way; see `search.so_far`.
    """

    graph: Graph
    meshes: Sequence[LogicalMesh]
    cluster: Cluster
    batched: frozenset[Tensor]
    fingerprint: str
    variables: Sequence[Variable]
    stand_ins: frozenset[Op] = frozenset()
    fixed: Mapping[str, Fixed] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, Fixed] = dataclasses.field(default_factory=dict)
    constraints: tuple[str, ...] = ()
    state_ratio: float | None = None
    compression: str | None = None
    recompute: bool | tuple[str, ...] | None = None
    microbatches: int = 1
    batch_statistics: BatchStatisticsOf = "exact"
    objective: Objective = Objective()
    budget: Budget = Budget()
    progress: Progress | None = None
    offer: Offer | None = None

    @property
    def memory_limit(self) -> float:
        """The bytes that a device may store; see `Objective`."""
        limit = self.objective.memory_limit
        return self.cluster.device.memory_bytes if limit is None else limit

    def excess(self, cost: Cost | None) -> float:
        """The bytes that a plan stores beyond the limit; none of one that was not priced."""
        return 0.0 if cost is None else max(0.0, cost.memory_bytes - self.memory_limit)

    def aiming(self, **changes: Any) -> Problem:
        """The same problem with another objective: `changes` to its fields."""
        objective = dataclasses.replace(self.objective, **changes)
        return dataclasses.replace(self, objective=objective)

    def plan(self, **found: Any) -> Plan:
        """The plan of what a planner has `found`, with what the problem says of it."""
        return Plan(
            tensors={name: given.spec for name, given in self.tensors.items()},
            constraints=self.constraints,
            fingerprint=self.fingerprint,
            cluster=self.cluster,
            **found,
        )


def step_anchors(plan: Plan, problem: Problem) -> Anchors:
    """What `plan` fixes of the problem's graph, inputs and outputs included."""
    axes = [plan.mesh.axis(n) for n in plan.batch_axes]
    graph = problem.graph
    return dataclasses.replace(
        plan.anchors(),
        inputs=[input_spec(t in problem.batched, plan.mesh, axes) for t in graph.inputs],
        outputs=[replicated(plan.mesh.num_axes)] * len(graph.outputs),
    )


class Planner(Protocol):
    """Finds a plan."""

    @property
    def name(self) -> str:
        """What plans say of who made them; plans of different names are cached apart."""
        ...

    def solve(self, problem: Problem) -> Plan:
        """The best plan that this planner finds for `problem`.

        Raises:
            PlanError: no plan satisfies the constraints.
        """
        ...
