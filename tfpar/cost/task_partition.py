"""Partition of a step in microbatches and stages into tasks: which op runs in which."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from tfpar.cost.liveness import Buffer, Buffers
from tfpar.cost.sub_batch_pricing import count_runs
from tfpar.ir.graph import Op, Tensor, Variable
from tfpar.ir.roles import BACKWARD, FORWARD, Roles
from tfpar.pipeline.statistics import EXACT, BatchStatistics
from tfpar.pipeline.step_graph import Crossing, Runs, crossings, find_weight_half, waits_of
from tfpar.pipeline.tasks import Kind
from tfpar.propagation.partitioned_graph import PartitionedGraph

if TYPE_CHECKING:
    from tfpar.cost.stage_memory import StageResidency


@dataclasses.dataclass(frozen=True, eq=False)
class TaskPartition:
    """Step in microbatches and stages, before it is known when its tasks run.

    Attributes:
        laid: the step on the mesh of a stage, with the axis of the microbatches behind its own.
        roles: of its ops.
        stage: of every op, as `pipeline.step_stages` gives it.
        num_stages: with none empty.
        state_ratio: bytes of optimizer slots per byte of weight; None if the graph holds the
            update itself.
        statistics: of the batch, those that each microbatch has of its own.
        held: what is known of the memory of its stages; see `StageMemory.held`.
    """

    laid: PartitionedGraph
    roles: Roles
    stage: Mapping[Op, int]
    num_stages: int
    state_ratio: float | None = None
    statistics: BatchStatistics = EXACT
    held: dict[Hashable, StageResidency] = dataclasses.field(default_factory=dict, init=False)

    @property
    def microbatches(self) -> int:
        """Number of microbatches in which the batch of a rank is cut."""
        return self.laid.mesh.shape[-1]

    @functools.cached_property
    def trains(self) -> bool:
        """Whether it has a backward pass; else it consists of forward tasks."""
        return BACKWARD in self.roles.phase.values()

    @functools.cached_property
    def runs(self) -> Runs:
        """Number of runs of its ops."""
        return count_runs(self.laid, self.roles, self.statistics)

    @functools.cached_property
    def buffers(self) -> Buffers:
        """Buffers of its ops."""
        return Buffers(self.laid)

    @functools.cached_property
    def crossings(self) -> list[Crossing]:
        """Tensors that its stages send each other."""
        return crossings(self.laid.graph, self.roles, self.stage, self.runs)

    @functools.cached_property
    def kinds(self) -> Mapping[Op, Kind]:
        """Kind of the task that runs each op: F, I, W; or U for what runs once a step, at its
        beginning or at its end."""
        weights = find_weight_half(self.laid.graph, self.roles, self.stage, self.runs)
        kinds: dict[Op, Kind] = {}
        for op in self.laid.graph.ops:
            phase = self.roles.phase[op]
            kinds[op] = "U"
            if op in self.runs.each and phase in (FORWARD, BACKWARD):
                kinds[op] = "F" if phase == FORWARD else "W" if op in weights else "I"
        return kinds

    @functools.cached_property
    def tasks(self) -> Mapping[tuple[int, Kind], Sequence[Op]]:
        """Ops of each kind at each stage, in the order of the graph."""
        found: dict[tuple[int, Kind], list[Op]] = {}
        for op in self.laid.graph.ops:
            found.setdefault((self.stage[op], self.kinds[op]), []).append(op)
        return found

    def ops(self, stage: int, kinds: Sequence[Kind]) -> Sequence[Op]:
        """List the ops of a task of these kinds, in the order of the graph."""
        found = [self.tasks.get((stage, kind), ()) for kind in kinds]
        if len(found) == 1:
            return found[0]
        return sorted(itertools.chain.from_iterable(found), key=self._places.__getitem__)

    @functools.cached_property
    def users(self) -> Mapping[Buffer, frozenset[tuple[int, Kind]]]:
        """Tasks that make or read each buffer."""
        found: dict[Buffer, set[tuple[int, Kind]]] = {}
        for op in self.laid.graph.ops:
            for buffer in self.buffers.used(op):
                found.setdefault(buffer, set()).add((self.stage[op], self.kinds[op]))
        return {buffer: frozenset(users) for buffer, users in found.items()}

    @functools.cached_property
    def past_joins(self) -> Mapping[int, Mapping[Buffer, range]]:
        """Buffers of all microbatches that each stage stores past joins, with the numbers of these:
        made before a join, and read of each microbatch after it."""
        waits = waits_of(self.laid.graph, self.roles, self.runs)
        spans: dict[int, dict[Buffer, range]] = {stage: {} for stage in range(self.num_stages)}
        if not any(waits.values()):
            return spans
        joins: dict[Op, int] = {}  # before an op, one after the other
        for op in self.laid.graph.ops:
            before = [joins[t.op] for t in op.inputs] + [joins[w] + 1 for w in waits[op]]
            joins[op] = max(before, default=0)
            if op not in self.runs.each:
                continue
            for buffer in self.buffers.used(op):
                maker = buffer[0].op
                for stage in {self.stage[maker], self.stage[op]} if maker in self.runs.each else ():
                    first = spans[stage].get(buffer, range(joins[op], 0)).start
                    spans[stage][buffer] = range(first, joins[op])
        return {stage: {b: span for b, span in of.items() if span} for stage, of in spans.items()}

    @functools.cached_property
    def joined(self) -> frozenset[Buffer]:
        """Buffers of all microbatches that some stage stores past a join."""
        return frozenset(itertools.chain.from_iterable(self.past_joins.values()))

    @functools.cached_property
    def variables(self) -> Mapping[Tensor, Variable]:
        """Its variables, by their handles."""
        return self.laid.graph.variable_of()

    @functools.cached_property
    def _places(self) -> Mapping[Op, int]:
        return {op: i for i, op in enumerate(self.laid.graph.ops)}
