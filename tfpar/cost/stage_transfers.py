"""Tensors that the stages of a step send each other, in bytes of a rank."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import collective_seconds, transfer_seconds
from tfpar.cost.pricer import shard_bytes
from tfpar.cost.task_partition import TaskPartition
from tfpar.ir.graph import Tensor, itemsize
from tfpar.pipeline.pipeline import groups_of
from tfpar.pipeline.stage_graph import StageGraph
from tfpar.pipeline.step_graph import PER_MICROBATCH, Crossing, stage_graph_of
from tfpar.pipeline.tasks import Kind
from tfpar.spec import Mesh, Replicate, Spec, local_shape, unsplit_dims

ORDER: tuple[Kind, ...] = ("F", "I", "W", "U")
"""The kinds of tasks, as those of a microbatch come."""


class StageTransfer(NamedTuple):
    """Tensor as it goes from one stage to another.

    Attributes:
        part_bytes: of a rank's part of it.
        axes: over whose ranks it is sent in slices; none: each sends all of its part.
        slices: how many make up a part.
        kind: of the task that reads it first.
    """

    part_bytes: int
    axes: tuple[int, ...]
    slices: int
    kind: Kind

    @property
    def num_bytes(self) -> float:
        """Bytes that a rank sends."""
        return self.part_bytes / self.slices


class SliceGather(NamedTuple):
    """Gather of slices by the ranks of a stage.

    Attributes:
        kind: of the task in which they do.
        is_per_microbatch: whether for each microbatch; else once a step.
    """

    kind: Kind
    is_per_microbatch: bool
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class StageTransfers:
    """Tensors that the stages of a step send each other, once it is known on which ranks they run.

    Attributes:
        actors: that run each stage. A tensor is sent once to each that reads it.
        prices: by which tensors are sent in slices; None: all are sent whole.
        arriving: the actors that have the layout of the step, where others have others: to these
            tensors come as they are kept in it (`compile.local.arrivals`), in slices along a dim.
            None: all have it.
    """

    step: TaskPartition
    actors: Sequence[int]
    prices: ScatterGatherCost | None = None
    arriving: frozenset[int] | None = None

    def stage_graph(self, num_bytes: Callable[[Crossing], float] | None = None) -> StageGraph:
        """Build the graph of what the stages read of each other.

        Args:
            num_bytes: of a tensor; by default what a rank sends of it.
        """
        step, size = self.step, num_bytes or self.sent_bytes
        return stage_graph_of(
            step.laid.graph,
            step.roles,
            step.stage,
            step.num_stages,
            runs=step.runs,
            num_bytes=lambda found: size(found) if self._is_first(found) else 0.0,
        )

    def gathers(self, stage: int) -> Iterator[SliceGather]:
        """List what a stage gathers of what it was sent in slices."""
        actor = self.actors[stage]
        for crossing in self.step.crossings:
            if crossing.target == stage and self._is_first(crossing):
                each = crossing.carries in PER_MICROBATCH
                for sent in self._sent[crossing]:
                    if sent.axes and self.prices is not None:
                        seconds = self.prices.gather_seconds(sent.axes, sent.part_bytes, actor)
                        yield SliceGather(sent.kind if each else "U", each, seconds)

    def sent_bytes(self, crossing: Crossing) -> float:
        """Find what a rank sends of a tensor, or of a variable's value, to its like in another
        stage."""
        return sum(sent.num_bytes for sent in self._sent[crossing])

    @functools.cached_property
    def sent_as(self) -> tuple[tuple[Crossing, tuple[StageTransfer, ...]], ...]:
        """Form in which each tensor crosses: whole or in slices."""
        return tuple(self._sent.items())

    def held_bytes(self, crossing: Crossing) -> float:
        """Find what a rank stores of a tensor at either end."""
        return sum(sent.part_bytes for sent in self._sent[crossing])

    def in_slices(self, stage: int) -> float:
        """Add up a microbatch's activations that a stage has once it has gathered them, beyond
        those that it was sent."""
        return sum(
            self.held_bytes(crossing) - self.sent_bytes(crossing)
            for crossing in self.step.crossings
            if crossing.target == stage
            and crossing.carries == "activations"
            and self._is_first(crossing)
        )

    def _is_first(self, crossing: Crossing) -> bool:
        """Whether its target is the first stage of its actor to read the tensor."""
        actor = self.actors[crossing.target]
        return self._first[crossing.tensor, actor] == crossing.target

    @functools.cached_property
    def _first(self) -> Mapping[tuple[Tensor, int], int]:
        """Of a tensor and an actor, the stage to which it is sent."""
        first: dict[tuple[Tensor, int], int] = {}
        for tensor, source, target, _ in self.step.crossings:
            stages = [target, first.get((tensor, self.actors[target]), target)]
            first[tensor, self.actors[target]] = min(stages) if source < target else max(stages)
        return first

    @functools.cached_property
    def _sent(self) -> Mapping[Crossing, tuple[StageTransfer, ...]]:
        """Form in which each tensor crosses: as it is read there. Tensors are resharded where they
        are made, but gathered where the whole is read, if no other stage reads that."""
        return {found: tuple(self._versions(found)) for found in self.step.crossings}

    def _versions(self, crossing: Crossing) -> Iterator[StageTransfer]:
        tensor, source, target, _ = crossing
        laid = self.step.laid
        variable = self.step.variables.get(tensor)
        read = self._read.get((tensor, target), {})
        if variable is not None and not read:
            read = {laid.variable_specs[variable]: "U"}
        found = variable or tensor
        shape, item = tuple(found.shape), itemsize(found.dtype)
        kept = laid.variable_specs[variable] if variable else laid.specs[tensor]
        if read and self.arriving is not None:
            read = {kept: min(read.values(), key=ORDER.index)}
        least = shard_bytes(shape, item, kept, laid.mesh)
        elsewhere = self._read_elsewhere(tensor, target)
        versions: dict[Spec, Kind] = {}
        for spec, kind in read.items():
            is_gathered = (
                shard_bytes(shape, item, spec, laid.mesh) > least and spec not in elsewhere
            )
            sent = kept if is_gathered else spec
            versions[sent] = min(kind, versions.get(sent, kind), key=ORDER.index)
        for spec, kind in versions.items():
            part = local_shape(shape, spec, laid.mesh)
            axes = self._axes(crossing, spec, shape, item)
            yield StageTransfer(math.prod(part) * item, axes, laid.mesh.group_size(axes), kind)

    def _axes(
        self, crossing: Crossing, spec: Spec, shape: tuple[int, ...], num_bytes: int
    ) -> tuple[int, ...]:
        source, target = self.actors[crossing.source], self.actors[crossing.target]
        given = crossing.tensor in self.step.laid.graph.outputs
        elsewhere = self.arriving is not None and target not in self.arriving
        if self.prices is None or source == target or elsewhere or given:
            return ()  # all ranks get what the step gives
        counts = [math.prod(local_shape(shape, spec, v)) for v in self.step.laid.mesh.views]
        lengths = [math.gcd(*counts)]
        if self.arriving is not None:
            lengths = [*unsplit_dims(shape, spec).values()]
        return self.prices.axes(spec, num_bytes * max(counts), lengths, source, target)

    def _read_elsewhere(self, tensor: Tensor, target: int) -> set[Spec]:
        """The specs in which other stages than `target` read a tensor."""
        stages = {*range(self.step.num_stages)} - {target}
        return set().union(*(self._read.get((tensor, stage), {}) for stage in stages))

    @functools.cached_property
    def _read(self) -> Mapping[tuple[Tensor, int], Mapping[Spec, Kind]]:
        """The specs in which a stage reads a tensor, or by its handle the value of a variable; and
        the task that does first."""
        found: dict[tuple[Tensor, int], dict[Spec, Kind]] = {}
        for op, decision in self.step.laid.decisions.items():
            kind = self.step.kinds[op]
            for tensor, spec in zip(op.inputs, decision.strategy.in_specs, strict=True):
                if tensor.op.type == "ReadVariableOp":
                    tensor = tensor.op.inputs[0]
                reading = found.setdefault((tensor, self.step.stage[op]), {})
                reading[spec] = min(kind, reading.get(spec, kind), key=ORDER.index)
        return found


# --- stages in unlike layouts ---------------------------------------------------------------


def pair_ranks(senders: Sequence[int], receivers: Sequence[int]) -> list[tuple[int, int]]:
    """Pair the ranks of two actors: each of the larger one with that of the other that has its part
    of the batch."""
    count = max(len(senders), len(receivers))
    return [
        (senders[i * len(senders) // count], receivers[i * len(receivers) // count])
        for i in range(count)
    ]


def resharded_stage_graph(
    transfers: Sequence[StageTransfers], layout_of: Sequence[int]
) -> StageGraph:
    """Build the graph of what stages read of each other, in bytes of each pair of ranks
    (`pair_ranks`): those of another layout get what they store in their own, or slices of it.

    Args:
        transfers: of the step in each layout.
        layout_of: the number of the layout of each stage.
    """
    first = transfers[0]
    if len({*layout_of}) == 1:
        return first.stage_graph()
    sizes = [t.step.laid.mesh.size // t.step.microbatches for t in transfers]
    received = [
        {_end_of(crossing): each.sent_bytes(crossing) for crossing in each.step.crossings}
        for each in transfers
    ]

    def num_bytes(crossing: Crossing) -> float:
        source, target = layout_of[crossing.source], layout_of[crossing.target]
        each = received[target].get(_end_of(crossing), first.held_bytes(crossing))
        return each * sizes[target] / max(sizes[source], sizes[target])

    return first.stage_graph(num_bytes)


def _end_of(crossing: Crossing) -> tuple[str, int, int]:
    return crossing.tensor.name, crossing.source, crossing.target


# --- slices ---------------------------------------------------------------------------------
# Which tensors go in slices: k ranks of a stage are to hold the same tensor of n bytes, as those of
# the stage before do.
#
#     whole       each gets it                                 n bytes to each rank
#     in slices   each gets a k-th of it, and they gather it   n / k bytes to each rank,
#                                                              and an all-gather of n bytes
#
# In one layout each rank sends to its like, whatever entries a slice has. Between unlike ones ranks
# are paired (`pair_ranks`), and a slice is one along a dim, so that it is a box (`spec.pieces`).
#
# The second is faster where links between stages are slower than those within them, as where stages
# lie on different machines (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
# Clusters Using Megatron-LM", 2021, §4.1: scatter/gather optimization).

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ScatterGatherCost:
    """Prices of tensors from one stage to another, whole and in slices.

    Attributes:
        meshes: of the ranks of each actor.
        cluster: of all ranks, actor by actor.
    """

    meshes: tuple[Mesh, ...]
    cluster: Cluster

    def axes(
        self, spec: Spec, part_bytes: int, lengths: Sequence[int], source: int, target: int
    ) -> Axes:
        """Choose the mesh axes of the target whose ranks each get a slice of a tensor; none where
        it goes whole.

        Args:
            spec: of the tensor on the target's mesh; what lies behind the axes of that is not
                looked at.
            part_bytes: of what a rank has of it; of the largest part, as all slice it alike.
            lengths: of what may be cut: the number of slices has to divide one of them.
            source, target: actors.
        """
        if self.cluster.one_memory:
            return ()  # nothing is copied on the way
        ways = [(), *self._ways(spec, lengths, self.meshes[target])]
        return min(ways, key=lambda axes: self.seconds(axes, part_bytes, source, target))

    def _ways(self, spec: Spec, lengths: Sequence[int], mesh: Mesh) -> Iterator[Axes]:
        """The sets of axes over which one of the lengths can be shared out in equal slices."""
        placed = enumerate(zip(spec, mesh.shape, strict=False))
        alike = [axis for axis, (p, size) in placed if isinstance(p, Replicate) and size > 1]
        for number in range(1, len(alike) + 1):
            for axes in itertools.combinations(alike, number):
                if any(length % mesh.group_size(axes) == 0 for length in lengths):
                    yield axes

    def seconds(self, axes: Axes, num_bytes: float, source: int, target: int) -> float:
        """Price a tensor sent in slices over `axes`, until all ranks of `target` have it.

        Args:
            num_bytes: of what one of these ranks has of it.
        """
        pairs = pair_ranks(self._ranks[source], self._ranks[target])
        mesh = self.meshes[target]
        each = num_bytes * mesh.size / len(pairs) / mesh.group_size(axes)
        sent = transfer_seconds(pairs, each, self.cluster)
        return sent + self.gather_seconds(axes, num_bytes, target)

    def gather_seconds(self, axes: Axes, num_bytes: float, actor: int) -> float:
        """Price the gather by which the ranks of `actor` get a tensor of which each has a slice."""
        part = _part(self.cluster, self._ranks[actor])
        return collective_seconds("all_gather", axes, num_bytes, self.meshes[actor], part)

    @functools.cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        """Those of each actor, as numbered in the cluster."""
        return groups_of([mesh.size for mesh in self.meshes])


@functools.lru_cache(maxsize=1024)
def _part(cluster: Cluster, ranks: tuple[int, ...]) -> Cluster:
    """The machines of some ranks."""
    return cluster.part(ranks)
