"""Problem that a planner solves, and the protocol of planners."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.ir.gathered_weights import gathered_tensors
from tfpar.ir.graph import Graph, Op, Tensor, Variable
from tfpar.ir.passes.slots import name_of_slots
from tfpar.pipeline import Pipeline
from tfpar.pipeline.statistics import BatchStatisticsOf
from tfpar.planning.incumbent import IncumbentCallback
from tfpar.planning.memo import Memo
from tfpar.planning.memory.peak_model import PeakMemoryModel
from tfpar.planning.meshes import LogicalMesh, input_spec
from tfpar.planning.objective import Budget, Objective
from tfpar.plans import Offload, Plan
from tfpar.plans.attention import AttentionMode
from tfpar.propagation.partitioned_graph import Anchors
from tfpar.spec import Spec, replicated_spec

Progress = Callable[[str, int], None]
"""Told of a search: (what is being searched, plans priced so far)."""


@dataclasses.dataclass(frozen=True)
class ConstrainedSpec:
    """A spec that is given, and by what.

    Attributes:
        slots, gathered, keep_gathered, scatters_gradient: as of a `PlannedVariable`.
    """

    spec: Spec
    why: str
    slots: Spec | None = None
    gathered: Spec | None = None
    keep_gathered: bool = False
    scatters_gradient: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class StepToPlan:
    """The step of a problem.

    Attributes:
        graph: what is searched; see `planning_graph`.
        batched: the inputs whose first dim is the batch.
        fingerprint: of the step; see `ir.fingerprint`.
        variables: all of the step, slots that `graph` lacks included.
        zero_cost_ops: ops of the graph that cost nothing.
        state_ratio: bytes of optimizer slots per byte of weight; None if the graph holds the
            update itself.
        compression: the dtype in which gradients travel; None: their own.
        jit_compile: XLA compiles the step, and what it fuses is priced so (`ir.kernels`).
        bound: the weights whose optimizer slots cannot be in host memory.
        attention: how attentions run in `graph`; see `plans.attention`.
        graph_memo: the memo of what depends on graphs alone.
    """

    graph: Graph
    batched: frozenset[Tensor]
    fingerprint: str
    variables: Sequence[Variable]
    zero_cost_ops: frozenset[Op] = frozenset()
    state_ratio: float | None = None
    compression: str | None = None
    jit_compile: bool = False
    bound: frozenset[str] = frozenset()
    attention: AttentionMode = "whole"
    graph_memo: Memo = dataclasses.field(default_factory=Memo)


@dataclasses.dataclass(frozen=True)
class GivenSpecs:
    """Specs that are given, by name.

    Attributes:
        variables: those of variables.
        tensors: those of border tensors.
        constraints: what the user asked for, as text.
    """

    variables: Mapping[str, ConstrainedSpec] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, ConstrainedSpec] = dataclasses.field(default_factory=dict)
    constraints: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StorageOptions:
    """Choices of the user that make a plan store less.

    Attributes:
        recompute: in the backward pass (see `planning.memory.recompute`): every block that repeats,
            none, those that patterns name, or (None) what memory asks for.
        offload: to host memory (see `planning.memory.offload`), or (None) what memory asks for.
        attention: how attentions run (see `planning.memory.blockwise_attention`), or (None) as
            memory asks for.
    """

    recompute: bool | tuple[str, ...] | None = None
    offload: Offload | None = None
    attention: AttentionMode | None = None


@dataclasses.dataclass(frozen=True)
class SubBatches:
    """The microbatches of a step, and the actors that it is shared out among.

    Attributes:
        microbatches: in which a rank computes its part of a training batch.
        samples: of each microbatch, which ranks are to have as many of; None: however many.
        kept_part: the part of the batch whose activations a rank stores at the same time.
        batch_statistics: what normalisations take them over; see `pipeline.Pipeline`.
        num_actors: a plan may use the summed memory of one rank of each.
    """

    microbatches: int = 1
    samples: int | None = None
    kept_part: float = 1.0
    batch_statistics: BatchStatisticsOf = "exact"
    num_actors: int = 1


@dataclasses.dataclass(frozen=True)
class SearchAim:
    """Aim of a search, and who follows it.

    Attributes:
        objective: what makes a plan the better one.
        budget: what the search may take.
        progress: callback of the search's progress.
        offer: callback of each new incumbent; see `planning.incumbent`.
    """

    objective: Objective = Objective()
    budget: Budget = Budget()
    progress: Progress | None = None
    offer: IncumbentCallback | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ProblemInstance:
    """Fixed data of a problem, whatever is asked of it.

    Attributes:
        memo: of what was found out about it; a changed instance has an empty one.
    """

    step: StepToPlan
    cluster: Cluster
    given: GivenSpecs = GivenSpecs()
    storage: StorageOptions = StorageOptions()
    memo: Memo = dataclasses.field(default_factory=Memo, init=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A step to plan on machines.

    Attributes:
        instance: step, machines, and what is given.
        meshes: the logical meshes to choose from; see `planning.meshes`.
        batch: its microbatches.
        aim: what the search is for.
    """

    instance: ProblemInstance
    meshes: Sequence[LogicalMesh]
    batch: SubBatches = SubBatches()
    aim: SearchAim = SearchAim()

    @property
    def step(self) -> StepToPlan:
        """The step to plan."""
        return self.instance.step

    @property
    def cluster(self) -> Cluster:
        """The machines."""
        return self.instance.cluster

    @property
    def given(self) -> GivenSpecs:
        """The specs that are given."""
        return self.instance.given

    @property
    def storage(self) -> StorageOptions:
        """The choices of the user that make a plan store less."""
        return self.instance.storage

    @property
    def memo(self) -> Memo:
        """The memo of the instance."""
        return self.instance.memo

    @property
    def decides_offload(self) -> bool:
        """Whether the planner may have something in host memory, which is not the devices'."""
        return self.storage.offload is None and not self.cluster.in_host_memory

    @property
    def may_offload_slots(self) -> bool:
        """Whether the slots of some weights may lie in host memory, which is not the devices'."""
        asked = self.storage.offload is None or bool(self.storage.offload.optimizer)
        return asked and not self.cluster.in_host_memory

    @property
    def least_state_ratio(self) -> float | None:
        """`state_ratio` of what devices store at least."""
        return 0.0 if self.step.state_ratio and self.may_offload_slots else self.step.state_ratio

    @property
    def memory_limit(self) -> float:
        """The bytes that a device may store; see `Objective`."""
        limit = self.aim.objective.memory_limit
        return self.cluster.device.memory_bytes if limit is None else limit

    @property
    def host_limit(self) -> float:
        """The bytes that a rank may have in the memory of its host; of a pipeline, one rank of each
        set together."""
        return self.batch.num_actors * self.cluster.host_share_bytes

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
        if self.batch.microbatches == 1:
            return always + at_peak.live_bytes(cost)
        return always + at_peak.in_microbatches(cost, self.batch.microbatches, self.batch.kept_part)

    def with_step(self, **changes: Any) -> Problem:
        """The problem of a changed step: `changes` to its fields."""
        return self._of(step=dataclasses.replace(self.step, **changes))

    def with_given(self, **changes: Any) -> Problem:
        """The problem with other specs given: `changes` to the fields of `GivenSpecs`."""
        return self._of(given=dataclasses.replace(self.given, **changes))

    def with_storage(self, **changes: Any) -> Problem:
        """The problem with other `StorageOptions`: `changes` to their fields."""
        return self._of(storage=dataclasses.replace(self.storage, **changes))

    def with_cluster(self, cluster: Cluster) -> Problem:
        """The problem for other machines, of which nothing is known yet."""
        return self._of(cluster=cluster)

    def with_batch(self, **changes: Any) -> Problem:
        """The same instance in other microbatches: `changes` to the fields of `SubBatches`."""
        return dataclasses.replace(self, batch=dataclasses.replace(self.batch, **changes))

    def with_meshes(self, meshes: Sequence[LogicalMesh]) -> Problem:
        """The same instance with other meshes to choose from."""
        return dataclasses.replace(self, meshes=meshes)

    def with_aim(self, **changes: Any) -> Problem:
        """The same instance for another search: `changes` to the fields of `SearchAim`."""
        return dataclasses.replace(self, aim=dataclasses.replace(self.aim, **changes))

    def with_objective(self, **changes: Any) -> Problem:
        """Return the same problem with another objective: `changes` to its fields."""
        return self.with_aim(objective=dataclasses.replace(self.aim.objective, **changes))

    def with_incumbent_callback(self, offer: IncumbentCallback | None) -> Problem:
        """The same instance; `offer` is called with each new incumbent."""
        return self.with_aim(offer=offer)

    def with_settings_of(self, other: Problem) -> Problem:
        """The same instance with the aim, meshes and microbatches of another problem."""
        return dataclasses.replace(other, instance=self.instance)

    def _of(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, instance=dataclasses.replace(self.instance, **changes))

    def on(self, machines: Cluster) -> Problem:
        """Return the same problem for these machines."""
        if machines == self.cluster:
            return self
        there = self.memo.of(ProblemsElsewhere)
        if machines not in there:
            there[machines] = self.with_cluster(machines)
        return there[machines].with_settings_of(self)

    def in_pipeline(self, pipeline: Pipeline | None) -> Problem:
        """Return the same problem in the microbatches of a pipeline with as many stages.

        Where there are stages to fill, ranks are to have as many samples of each microbatch: meshes
        that split the batch otherwise are left out, if others are left. (What is padded is computed
        too, and kept whole where a step has to meet for it.)
        """
        if pipeline is None:
            return self
        microbatches, meshes, samples = pipeline.num_microbatches, self.meshes, None
        if pipeline.num_actors > 1:
            samples_of_all = (t.shape[0] or 0 for t in self.step.batched if t.shape)
            each = max(samples_of_all, default=0) // microbatches
            even = [m for m in meshes if each and each % m.batch_parts == 0]
            if even:
                meshes, samples = even, each
        batch = SubBatches(
            microbatches,
            samples,
            pipeline.kept_part,
            pipeline.batch_statistics,
            pipeline.num_actors,
        )
        return dataclasses.replace(self, meshes=meshes, batch=batch)

    def plan(self, **found: Any) -> Plan:
        """Return the plan whose attributes a planner has `found`, with what the problem says."""
        gathers = gathered_tensors(self.step.graph, self.given.variables)
        given = self.given.tensors.items()
        variables = dict(found.pop("variables"))
        for name, asked in self.given.variables.items():
            if name in variables and (asked.slots or asked.gathered):
                variables[name] = dataclasses.replace(variables[name], **vars(asked))
        return Plan(
            variables=variables,
            tensors={name: one.spec for name, one in given if name not in gathers},
            constraints=self.given.constraints,
            fingerprint=self.step.fingerprint,
            cluster=self.cluster,
            attention=self.step.attention,
            **found,
        )


class ProblemsElsewhere(dict[Cluster, Problem]):
    """The same problem for other machines."""


def step_anchors(plan: Plan, problem: Problem) -> Anchors:
    """Return the anchors of `plan` on the problem's graph, inputs and outputs included."""
    axes = [plan.mesh.axis(n) for n in plan.batch_axes]
    graph, anchors = problem.step.graph, plan.anchors()
    slots = {name_of_slots(weight): spec for weight, spec in anchors.slots.items()}
    return dataclasses.replace(
        anchors,
        tensors={**anchors.tensors, **slots, **gathered_tensors(graph, plan.variables)},
        inputs=[input_spec(t in problem.step.batched, plan.mesh, axes) for t in graph.inputs],
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
