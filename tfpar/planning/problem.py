"""Problem that a planner solves, and the protocol of planners."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.ir.graph import Graph, Op, Tensor, Variable
from tfpar.ir.passes.separate_slots import name_of_slots
from tfpar.pipeline import Pipeline
from tfpar.pipeline.statistics import BatchStatisticsOf
from tfpar.planning.incumbent import IncumbentCallback
from tfpar.planning.memo import Memo
from tfpar.planning.memory.peak_model import PeakMemoryModel
from tfpar.planning.meshes import LogicalMesh, input_spec
from tfpar.planning.objective import Budget, Objective
from tfpar.plans import Offload, Plan
from tfpar.propagation.partitioned_graph import Anchors
from tfpar.spec import Spec, replicated_spec

Progress = Callable[[str, int], None]
"""Told of a search: (what is being searched, plans priced so far)."""


@dataclasses.dataclass(frozen=True)
class ConstrainedSpec:
    """A spec that is given, and by what."""

    spec: Spec
    why: str


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A step to plan.

    Attributes:
        graph: what is searched; see `planning_graph`.
        zero_cost_ops: ops of it that cost nothing.
        meshes: the logical meshes to choose from; see `planning.meshes`.
        cluster: the machines.
        batched: the inputs whose first dim is the batch.
        fingerprint: of the step; see `ir.fingerprint`.
        variables: all of the step, slots that `graph` lacks included.
        fixed: specs of variables that are given, by name; those of border tensors are `tensors`.
        constraints: what the user asked for, as text.
        state_ratio: bytes of optimizer slots per byte of weight; None if the graph holds the
            update itself.
        compression: the dtype in which gradients travel; None: their own.
        jit_compile: XLA compiles the step, and what it fuses is priced so (`ir.kernels`).
        recompute: what to compute again in the backward pass (see `planning.memory.recompute`):
            every block that repeats, none, those that patterns name, or (None) what memory asks
            for.
        offload: what to have in host memory (see `planning.memory.offload`), or (None) what memory
            asks for.
        bound: the weights whose optimizer slots cannot be there.
        microbatches: in which a rank computes its part of a training batch.
        samples: of each microbatch, which ranks are to have as many of; None: however many.
        kept_part: the part of the batch whose activations a rank stores at the same time.
        batch_statistics: what normalisations take them over; see `pipeline.Pipeline`.
        num_actors: among which the step is shared out as stages: a plan may store what a rank of
            each of them may, together (see `planning.memory.stages`).
        objective: what makes a plan the better one.
        budget: what the search may take.
        progress: reports the progress of the search.
        offer: is called with each better plan on the way; see `planning.incumbent`.
        of_graphs: the memo of what depends on graphs alone.
        memo: the memo of the problem; one that differs in more than in what it is asked for has an
            empty one at first.
    """

    graph: Graph
    meshes: Sequence[LogicalMesh]
    cluster: Cluster
    batched: frozenset[Tensor]
    fingerprint: str
    variables: Sequence[Variable]
    zero_cost_ops: frozenset[Op] = frozenset()
    fixed: Mapping[str, ConstrainedSpec] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, ConstrainedSpec] = dataclasses.field(default_factory=dict)
    constraints: tuple[str, ...] = ()
    state_ratio: float | None = None
    compression: str | None = None
    jit_compile: bool = False
    recompute: bool | tuple[str, ...] | None = None
    offload: Offload | None = None
    bound: frozenset[str] = frozenset()
    microbatches: int = 1
    samples: int | None = None
    kept_part: float = 1.0
    batch_statistics: BatchStatisticsOf = "exact"
    num_actors: int = 1
    objective: Objective = Objective()
    budget: Budget = Budget()
    progress: Progress | None = None
    offer: IncumbentCallback | None = None
    of_graphs: Memo = dataclasses.field(default_factory=Memo)
    memo: Memo = dataclasses.field(default_factory=Memo, init=False)

    @property
    def decides_offload(self) -> bool:
        """Whether the planner may have something in host memory, which is not the devices'."""
        return self.offload is None and not self.cluster.in_host_memory

    @property
    def may_offload_slots(self) -> bool:
        """Whether the slots of some weights may lie in host memory, which is not the devices'."""
        asked = self.offload is None or bool(self.offload.optimizer)
        return asked and not self.cluster.in_host_memory

    @property
    def least_state_ratio(self) -> float | None:
        """`state_ratio` of what devices store at least."""
        return 0.0 if self.state_ratio and self.may_offload_slots else self.state_ratio

    @property
    def memory_limit(self) -> float:
        """The bytes that a device may store; see `Objective`."""
        limit = self.objective.memory_limit
        return self.cluster.device.memory_bytes if limit is None else limit

    @property
    def host_limit(self) -> float:
        """The bytes that a rank may have in the memory of its host; of a pipeline, one rank of each
        set together."""
        return self.num_actors * self.cluster.host_share_bytes

    def excess(self, cost: Cost | None) -> float:
        """Return the bytes that a plan stores beyond what the device and its host have room for;
        none of one that was not priced."""
        if cost is None:
            return 0.0
        return max(0.0, cost.memory_bytes - self.memory_limit) + self._host_excess(cost)

    def excess_in_parts(self, cost: Cost | None) -> float:
        """Estimate `excess` of a plan that was priced as if it computed its batch in one piece."""
        if cost is None:
            return 0.0
        stored = self.stored_bytes(cost, PeakMemoryModel.of(cost))
        return max(0.0, stored - self.memory_limit) + self._host_excess(cost)

    def _host_excess(self, cost: Cost) -> float:
        return max(0.0, cost.host_bytes - self.host_limit)

    def stored_bytes(self, cost: Cost, at_peak: PeakMemoryModel) -> float:
        """About what a plan stores at most as it runs, in microbatches if there are any.

        Args:
            cost: of the step in one piece.
            at_peak: what comes of its sums.
        """
        always = cost.weight_bytes + cost.state_bytes
        if self.microbatches == 1:
            return always + at_peak.live_bytes(cost)
        return always + at_peak.in_microbatches(cost, self.microbatches, self.kept_part)

    def with_objective(self, **changes: Any) -> Problem:
        """Return the same problem with another objective: `changes` to its fields."""
        return self._asked(objective=dataclasses.replace(self.objective, **changes))

    def with_incumbent_callback(self, offer: IncumbentCallback | None) -> Problem:
        """Return the same problem, which calls `offer` with better plans."""
        return self._asked(offer=offer)

    def with_settings_of(self, other: Problem) -> Problem:
        """Return the same problem with the objective, budget, meshes, microbatches and listeners of
        another."""
        return self._asked(
            objective=other.objective,
            budget=other.budget,
            progress=other.progress,
            offer=other.offer,
            microbatches=other.microbatches,
            samples=other.samples,
            kept_part=other.kept_part,
            batch_statistics=other.batch_statistics,
            num_actors=other.num_actors,
            meshes=other.meshes,
        )

    def on(self, machines: Cluster) -> Problem:
        """Return the same problem for these machines."""
        if machines == self.cluster:
            return self
        there = self.memo.of(ProblemsElsewhere)
        if machines not in there:
            there[machines] = dataclasses.replace(self, cluster=machines)
        return there[machines].with_settings_of(self)

    def in_pipeline(self, pipeline: Pipeline | None) -> Problem:
        """Return the same problem in the microbatches of a pipeline with as many stages.

        Where there are stages to fill, ranks are to have as many samples of each microbatch: meshes
        that split the batch otherwise are left out, if others are left. (What is padded is computed
        too, and kept whole where a step has to meet for it.)
        """
        if pipeline is None:
            return self
        microbatches, meshes, samples = pipeline.order.num_microbatches, self.meshes, None
        if pipeline.order.num_actors > 1:
            batch = max((t.shape[0] or 0 for t in self.batched if t.shape), default=0)
            each = batch // microbatches
            even = [m for m in meshes if each and each % m.batch_parts == 0]
            if even:
                meshes, samples = even, each
        return self._asked(
            meshes=meshes,
            microbatches=microbatches,
            samples=samples,
            kept_part=pipeline.kept_part,
            batch_statistics=pipeline.batch_statistics,
            num_actors=pipeline.order.num_actors,
        )

    def _asked(self, **changes: Any) -> Problem:
        asked = dataclasses.replace(self, **changes)
        object.__setattr__(asked, "memo", self.memo)
        return asked

    def plan(self, **found: Any) -> Plan:
        """Return the plan of what a planner has `found`, with what the problem says of it."""
        return Plan(
            tensors={name: given.spec for name, given in self.tensors.items()},
            constraints=self.constraints,
            fingerprint=self.fingerprint,
            cluster=self.cluster,
            **found,
        )


class ProblemsElsewhere(dict[Cluster, Problem]):
    """The same problem for other machines."""


def step_anchors(plan: Plan, problem: Problem) -> Anchors:
    """Return the anchors of `plan` on the problem's graph, inputs and outputs included."""
    axes = [plan.mesh.axis(n) for n in plan.batch_axes]
    graph, anchors = problem.graph, plan.anchors()
    slots = {name_of_slots(weight): spec for weight, spec in anchors.slots.items()}
    return dataclasses.replace(
        anchors,
        tensors={**anchors.tensors, **slots},
        inputs=[input_spec(t in problem.batched, plan.mesh, axes) for t in graph.inputs],
        outputs=[replicated_spec(plan.mesh.num_axes)] * len(graph.outputs),
    )


class Planner(Protocol):
    """Finds a plan."""

    @property
    def name(self) -> str:
        """Name of the planner in plans; plans of different names are cached apart."""
        ...

    def solve(self, problem: Problem) -> Plan:
        """Return the best plan that this planner finds for `problem`.

        Raises:
            PlanError: no plan satisfies the constraints.
        """
        ...
