"""What a planner is asked, and what any planner is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tfpar.cluster.description import Cluster
from tfpar.ir.graph import Graph, Op, Tensor, Variable
from tfpar.plans import Plan
from tfpar.search.so_far import Offer
from tfpar.spec import Mesh, Replicate, Shard, Spec

UNCERTAINTY = 0.1
"""How far apart, as a part of a step, two predictions have to be to tell which plan is faster.

Measured by `python -m benchmarks.prediction`, which says by how much the ratio of two predicted
steps differs from that of the measured ones: for plans predicted within a quarter of each other it
is 13 % in the middle on ranks in one process (42 pairs) and 21 % on the loopback (6 pairs), on two
cores that had other work too; rounded down, as idle machines are steadier."""

Progress = Callable[[str, int], None]
"""Told of a search: (what is being searched, plans priced so far)."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Logical axes over the ranks.

    Attributes:
        batch_axes: the axes that split the batch.
        model_axes: the axes over which weights may be split.
        used_axes: those along which some weight has to be: else their ranks would all compute
            the same.
    """

    mesh: Mesh
    batch_axes: tuple[int, ...]
    model_axes: tuple[int, ...]
    used_axes: tuple[int, ...] = ()

    def __str__(self) -> str:
        names = " and ".join(self.mesh.axis_names[a] for a in self.batch_axes) or "no axis"
        return f"{self.mesh}, batch over {names}"


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
        layouts: the logical meshes to choose from; see `free_layouts`.
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
        uncertainty: how far apart, as a part of a step, the predictions for two plans have to be
            to tell which is faster; of those nearer the simplest is taken (`search.simplest`).
        progress: is told of the search.
        offer: is told of each better plan on the way; see `search.so_far`.
    """

    graph: Graph
    layouts: Sequence[Layout]
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
    uncertainty: float = UNCERTAINTY
    progress: Progress | None = None
    offer: Offer | None = None

    def excess(self, plan: Plan) -> float:
        """Bytes that `plan` stores beyond the memory of a device."""
        if plan.cost is None:
            return 0.0
        return max(0.0, plan.cost.memory_bytes - self.cluster.device.memory_bytes)

    def plan(self, **found: Any) -> Plan:
        """The plan of what a planner has `found`, with what the problem says of it."""
        return Plan(
            tensors={name: given.spec for name, given in self.tensors.items()},
            constraints=self.constraints,
            fingerprint=self.fingerprint,
            cluster=self.cluster,
            **found,
        )


def free_layouts(mesh: Mesh) -> list[Layout]:
    """Every way to lay a data and a model axis over the ranks; data parallelism first.

    The batch is split over the data axis, or over both: then what no weight's split asks for
    otherwise is data parallel along the model axis too (experts, a wide classifier). Last come
    those with every DeviceMesh(d1, d2) in place of the model axis, which splits weights in two dims
    (ATP §3.2).
    """
    found, in_two = [], []
    for model_size in _divisors(mesh.size):
        data_size = mesh.size // model_size
        logical = Mesh(("data", "model"), (data_size, model_size))
        if model_size == 1:
            found.append(Layout(logical, (0, 1), ()))
        else:
            found += [Layout(logical, (0, 1), (1,)), Layout(logical, (0,), (1,), (1,))]
        for d2 in _divisors(model_size)[1:-1]:
            logical = Mesh(("data", "d1", "d2"), (data_size, model_size // d2, d2))
            in_two.append(Layout(logical, (0,), (1, 2), (1, 2)))
    return found + in_two


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]


def given_layout(mesh: Mesh, batch_axes: Sequence[str]) -> Layout:
    """The mesh as it is, its axes named by constraints; weights may be split over the others."""
    batch = tuple(mesh.axis(n) for n in batch_axes)
    used = tuple(a for a in range(mesh.num_axes) if mesh.shape[a] > 1)
    return Layout(mesh, batch, tuple(a for a in used if a not in batch) or used)


def input_spec(batched: bool, mesh: Mesh, axes: Sequence[int]) -> Spec:
    """The spec of a step's input: a batch is split over mesh axes `axes`, the rest is whole."""
    return tuple(Shard(0) if batched and a in axes else Replicate() for a in range(mesh.num_axes))


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
