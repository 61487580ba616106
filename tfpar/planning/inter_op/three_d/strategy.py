"""`Strategy3D`: degrees, placement, microbatches and layers of each stage (auto3d, §4.1)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

from tfpar.pipeline.recompute import RecomputeOf, recompute_of, recompute_text
from tfpar.planning.inter_op.three_d.cost_table import LayerLayout
from tfpar.spec import PlanError
from tfpar.spec.arguments import integer


class MemoryOptions(NamedTuple):
    """Options that reduce the memory of a stage.

    Attributes:
        recompute: a stage keeps only what its layers read, and computes the rest of a layer again
            in the backward pass (Chen et al. 2016).
        shard_slots: copies share the slots of the optimizer out among them, and gather the weights
            that each has updated (ZeRO-1: Rajbhandari et al. 2020, §5.1).
        offload_slots: slots lie in the memory of hosts, and come to the device and go back once a
            step (ZeRO-Offload: Ren et al. 2021).
    """

    recompute: bool = False
    shard_slots: bool = False
    offload_slots: bool = False


_OPTION_TEXTS = "recomputed", "slots sharded", "slots offloaded"
"""The options of `MemoryOptions`, as text."""


class OverlapOptions(NamedTuple):
    """Options that overlap communication with computation.

    Attributes:
        gradients: copies sum the gradients of each layer as soon as the backward pass of the last
            microbatch has them (Li et al. 2020, §3.2); else those of a stage once it has them all.
        transfers: what goes from stage to stage; else a rank sends first, and then goes on.
    """

    gradients: bool = False
    transfers: bool = True

    def __str__(self) -> str:
        return "".join(
            text
            for text, shown in [
                (", gradients overlapped", self.gradients),
                (", transfers not overlapped", not self.transfers),
            ]
            if shown
        )


@dataclasses.dataclass(frozen=True)
class Strategy3D:
    """Strategy for training a model on a cluster: degrees of stages, data and tensor parallelism.

    Attributes:
        data: how many copies of the pipeline share the batch.
        tensor: over how many ranks each layer is split.
        microbatch: samples of a microbatch, of each copy.
        counts: layers of each stage, virtual ones counted.
        ranks: of the cluster, for (actor, copy, part of a layer), the last of them the fastest; by
            default the cluster's first in their order.
        virtual: stages of each actor, which lie as many apart as there are actors.
        shares: microbatches of each copy; by default as many for each.
        memory: what is done to store less: in all stages, or, where they differ, in each.
        experts: copies that share the experts of each layer out among them. Those copies follow
            each other; as many groups of them as there are have the same experts.
        overlap: what is sent while ranks compute.

    Raises:
        PlanError: another number of ranks than the degrees need, one of them twice, a stage without
            layers, stages that actors do not share evenly, copies that do not come out even in
            groups that share experts, or shares that are not one for each copy, and the same for
            copies that share experts.
    """

    data: int
    tensor: int
    microbatch: int
    counts: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    virtual: int = 1
    shares: tuple[int, ...] = ()
    memory: MemoryOptions | tuple[MemoryOptions, ...] = MemoryOptions()
    experts: int = 1
    overlap: OverlapOptions = OverlapOptions()

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "microbatch", "virtual", "experts"):
            integer(name, getattr(self, name), 1)
        if not self.counts or min(self.counts) < 1:
            raise PlanError(f"Stages have {self.counts} layers: each has one at least.")
        if self.stages % self.virtual:
            raise PlanError(
                f"{self.stages} stages are not {self.virtual} for each of some sets of ranks."
            )
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.size)))
        if len(self.ranks) != self.size or len(set(self.ranks)) != self.size:
            raise PlanError(
                f"{self.actors} stages x {self.data} data x {self.tensor} tensor need {self.size} "
                f"different ranks; the placement has {len(set(self.ranks))}."
            )
        if self.shares and (len(self.shares) != self.data or min(self.shares) < 1):
            raise PlanError(
                f"{self.data} copies cannot run {self.shares} microbatches: give one number above "
                f"0 for each."
            )
        if not isinstance(self.memory, MemoryOptions):
            if len(self.memory) != self.stages:
                raise PlanError(
                    f"{self.stages} stages cannot have {len(self.memory)} memory options: give one "
                    f"for each, or one for all."
                )
            if len({*self.memory}) == 1:
                object.__setattr__(self, "memory", self.memory[0])
        if self.data % self.experts:
            raise PlanError(f"{self.data} copies are no groups of {self.experts} for the experts.")
        groups = itertools.groupby(range(len(self.shares)), lambda copy: copy // self.experts)
        if any(len({self.shares[copy] for copy in group}) > 1 for _, group in groups):
            raise PlanError(
                f"Copies that share experts run as many microbatches each; of {self.shares} "
                f"groups of {self.experts} do not."
            )

    def __str__(self) -> str:
        layers = "+".join(map(str, self.counts))
        virtual = f" of {self.virtual} parts" if self.virtual > 1 else ""
        shares = f", {'+'.join(map(str, self.shares))} of them" if self.shares else ""
        experts = f", experts over {self.experts}" if self.experts > 1 else ""
        return (
            f"{self.actors} stages{virtual} x {self.data} data x {self.tensor} tensor{experts}, "
            f"microbatches of {self.microbatch}{shares}, layers {layers}{self._memory_text()}"
            f"{self.overlap}"
        )

    def _memory_text(self) -> str:
        """The options that are used, and the stages that use them if not all do."""
        each = zip(*map(self.options, range(self.stages)), strict=True)
        found = ""
        for text, used in zip(_OPTION_TEXTS, each, strict=True):
            stages = recompute_of((s for s, is_used in enumerate(used) if is_used), self.stages)
            if stages:
                some = recompute_text(stages)
                found += f", {text}{some and f' in {some}'}"
        return found

    def options(self, stage: int) -> MemoryOptions:
        """Return what a stage does to store less."""
        return self.memory if isinstance(self.memory, MemoryOptions) else self.memory[stage]

    def layout(self, stage: int) -> LayerLayout:
        """Return the layout of a stage's layers over its ranks."""
        memory = self.options(stage)
        return LayerLayout(self.data, self.tensor, self.microbatch, self.experts, *memory)

    @property
    def recompute(self) -> RecomputeOf:
        """The stages that are computed again in the backward pass."""
        again = (s for s in range(self.stages) if self.options(s).recompute)
        return recompute_of(again, self.stages)

    @property
    def stages(self) -> int:
        """Number of stages, virtual ones counted."""
        return len(self.counts)

    @property
    def actors(self) -> int:
        """Number of actors."""
        return len(self.counts) // self.virtual

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.actors * self.data * self.tensor

    @functools.cached_property
    def runs(self) -> tuple[range, ...]:
        """The layers of each stage."""
        ends = itertools.accumulate(self.counts)
        return tuple(range(end - n, end) for n, end in zip(self.counts, ends, strict=True))

    def stages_of(self, actor: int) -> range:
        """Return the stages of an actor."""
        return range(actor, self.stages, self.actors)

    def stage(self, number: int) -> tuple[int, ...]:
        """Return the ranks of a stage, copy by copy."""
        size = self.data * self.tensor
        first = number % self.actors * size
        return self.ranks[first : first + size]

    def microbatches(self, batch: int) -> tuple[int, ...]:
        """Return the number of microbatches in which each copy runs its part of a batch of `batch`
        samples.

        Raises:
            PlanError: they do not come out even, or the shares are those of another batch.
        """
        integer("batch", batch, 1)
        if self.shares:
            if sum(self.shares) * self.microbatch != batch:
                raise PlanError(
                    f"A batch of {batch} is not {sum(self.shares)} microbatches of "
                    f"{self.microbatch}, which the copies run."
                )
            return self.shares
        found, rest = divmod(batch, self.data * self.microbatch)
        if rest:
            raise PlanError(
                f"A batch of {batch} does not divide into {self.data} copies x microbatches of "
                f"{self.microbatch}."
            )
        return (found,) * self.data
