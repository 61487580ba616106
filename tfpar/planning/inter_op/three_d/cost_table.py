"""`LayerCostTable`: seconds, bytes and memory of the layers of a model, by layout and microbatch
size.

A search of pipelines asks it one thing: the `LayerCost` of a kind of layers in a `LayerLayout`.
Layers that are measured or computed by hand are `LayerType`s, whose costs follow from a few
numbers; those of a captured step are priced under the plan of each layout
(`planning.inter_op.three_d.from_step`).

Times are by device, tensor degree and microbatch size, because none of them follows from another:
a smaller part of a matrix product runs at a smaller part of a device's rate. What ranks exchange is
given in bytes, and priced on the links that they have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from tfpar.spec import PlanError
from tfpar.spec.arguments import argument_error, finite


class ProfileKey(NamedTuple):
    """Key of a layer's profile: all that its time depends on.

    Attributes:
        device: its name.
        tensor: over how many ranks the layer is split.
        microbatch: samples of a microbatch.
        experts: over how many copies the layer's experts are spread; 1 of a layer without.
    """

    device: str
    tensor: int
    microbatch: int
    experts: int = 1


class LayoutDegrees(NamedTuple):
    """Degrees of a layout: copies of a stage, ranks that each layer is split over, and copies that
    share the experts of a layer out among them."""

    data: int
    tensor: int
    experts: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor

    def __str__(self) -> str:
        experts = f", experts over {self.experts}" if self.experts > 1 else ""
        return f"{self.data} x {self.tensor}{experts}"


class LayerLayout(NamedTuple):
    """Layout of a stage's layers over its ranks, and the microbatch of each copy.

    Attributes:
        data: copies of the stage, which share the batch.
        tensor: ranks that each layer is split over.
        microbatch: samples of a microbatch, of each copy.
        experts: copies that share the experts of a layer out among them.
        recompute, shard_slots, offload_slots: see `strategy.MemoryOptions`.
    """

    data: int
    tensor: int
    microbatch: int
    experts: int = 1
    recompute: bool = False
    shard_slots: bool = False
    offload_slots: bool = False

    @property
    def degrees(self) -> LayoutDegrees:
        """The degrees alone."""
        return LayoutDegrees(self.data, self.tensor, self.experts)


class Passes(NamedTuple):
    """Seconds of the forward and of the backward pass of a microbatch."""

    forward: float
    backward: float

    def plus(self, other: Passes, times: float = 1) -> Passes:
        """Add those of others, so many times."""
        return Passes(self.forward + times * other.forward, self.backward + times * other.backward)

    def recomputed(self) -> Passes:
        """With the forward pass once more in the backward pass."""
        return Passes(self.forward, self.backward + self.forward)


NO_TIME = Passes(0.0, 0.0)


class LayerExchange(NamedTuple):
    """A collective that all groups of a stage's ranks take part in.

    Attributes:
        kind: one of `spec.names.COLLECTIVES`.
        axes: of the mesh of `LayerCost.sizes`.
        num_bytes: the payload of a rank.
        times: that it runs.
    """

    kind: str
    axes: tuple[int, ...]
    num_bytes: float
    times: float = 1.0


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """Seconds, bytes and memory of a layer in a layout, on each rank.

    Attributes:
        sizes: of the axes of the mesh of the stage's ranks.
        seconds: that a rank computes of a microbatch, by device.
        forward, backward: what ranks exchange in the passes of a microbatch.
        sums: what they exchange once a step, behind the last backward pass: sums of gradients.
        gathers: what they exchange behind these.
        update_s: of what a rank computes once a step, by device.
        together: copies that wait for each other in each microbatch; those follow each other.
        fixed_bytes: that a rank stores all the time.
        kept_bytes: that it keeps of a microbatch for its backward pass.
        working_bytes: that it needs beside while it runs a backward pass, or its update.
        sent_bytes, returned_bytes: that a rank sends of a microbatch to the next stage, if that
            begins behind the layer, and gets back of it.
        host_bytes: that a rank has in host memory: they come to the device and go back once a step.
        dispatch_s: in which a host issues the ops of a microbatch, by device; 0 of others.
    """

    sizes: tuple[int, ...]
    seconds: Mapping[str, Passes]
    forward: tuple[LayerExchange, ...] = ()
    backward: tuple[LayerExchange, ...] = ()
    sums: tuple[LayerExchange, ...] = ()
    gathers: tuple[LayerExchange, ...] = ()
    update_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    together: int = 1
    fixed_bytes: float = 0.0
    kept_bytes: float = 0.0
    working_bytes: float = 0.0
    sent_bytes: float = 0.0
    returned_bytes: float = 0.0
    host_bytes: float = 0.0
    dispatch_s: Mapping[str, Passes] = dataclasses.field(default_factory=dict)


class Kind(Protocol):
    """Layer type, as a search sees it."""

    @property
    def shapes(self) -> Collection[tuple[int, int]]:
        """The tensor degrees and microbatch sizes that it may have costs for."""
        ...

    @property
    def expert_degrees(self) -> Collection[int]:
        """Over how many copies its experts can be spread; 1 of a layer without."""
        ...

    @property
    def can_recompute(self) -> bool:
        """Whether it can be computed again in the backward pass."""
        ...

    @property
    def can_shard_slots(self) -> bool:
        """Whether copies can share slots of the optimizer out."""
        ...

    @property
    def can_offload_slots(self) -> bool:
        """Whether slots of the optimizer can lie in host memory."""
        ...

    def has(self, device: str, layout: LayerLayout) -> bool:
        """Whether there is a cost for it."""
        ...

    def cost(self, layout: LayerLayout) -> LayerCost:
        """Return its cost on the devices that there are times for."""
        ...


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a mixture-of-experts layer (GShard: Lepikhin et al. 2021, §2).

    Copies can share them out, each as many: tokens then go to the copy that has their expert, and
    come back. It is assumed that all experts get as many tokens. Tensor ranks split each expert.

    Attributes:
        fixed_bytes: of all experts: weights, gradients, slots. Part of the layer's, as the others.
        gradient_bytes: that those copies sum that have the same experts.
        routed_bytes: of a sample, the tokens that go to experts, and those that come back: each of
            the two once in the forward pass, and once in the backward pass.
        slot_bytes: of `fixed_bytes`, what the optimizer alone reads.
        weight_bytes: that copies with the same experts gather if they share slots out.
    """

    fixed_bytes: float = 0.0
    gradient_bytes: float = 0.0
    routed_bytes: float = 0.0
    slot_bytes: float = 0.0
    weight_bytes: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            finite(f"experts.{field.name}", getattr(self, field.name))


GROUPS, EXPERTS, TENSOR = 0, 1, 2
"""Axes of the mesh of a stage whose layers are `LayerType`s. Copies are along the first two: those
along the second share experts."""

_SHARED = ("fixed_bytes", "gradient_bytes", "slot_bytes", "weight_bytes")
"""Bytes of a layer that its experts have a part of."""


@dataclasses.dataclass(frozen=True)
class LayerType:
    """Type of equal layers.

    Attributes:
        seconds: of a microbatch on one rank, without what ranks exchange; of a layer with experts,
            by the number of copies that share these.
        fixed_bytes: of the whole layer: weights, their gradients, slots of the optimizer.
        gradient_bytes: of the whole layer, that data-parallel ranks sum once a step.
        kept_bytes: of a sample, of the whole layer: what the backward pass reads.
        reduced_bytes: of a sample, that the ranks over which the layer is split sum in the forward
            pass; the backward pass sums as many.
        sent_bytes: of a sample, that the next layer reads: every one of these ranks has all of it.
        input_bytes: of a sample, that is kept if the rest of `kept_bytes` is computed again: every
            one of these ranks has all of it. None: the layer cannot be computed again.
        slot_bytes: of `fixed_bytes`, what the optimizer alone reads, which copies can share out.
        weight_bytes: of the whole layer, that they then gather once a step.
        experts: those of the layer; None: it has none.
        update_s: in which a device updates the weights of the whole layer, by device.
        dispatch_s: in which a host issues the ops of a microbatch, by device.
    """

    seconds: Mapping[ProfileKey, Passes]
    fixed_bytes: float = 0.0
    gradient_bytes: float = 0.0
    kept_bytes: float = 0.0
    reduced_bytes: float = 0.0
    sent_bytes: float = 0.0
    input_bytes: float | None = None
    slot_bytes: float = 0.0
    weight_bytes: float = 0.0
    experts: Experts | None = None
    update_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    dispatch_s: Mapping[str, Passes] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for case, passes in self.seconds.items():
            for name, value in passes._asdict().items():
                finite(f"seconds[{tuple(case)}].{name}", value)
        for device, passes in self.dispatch_s.items():
            for name, value in passes._asdict().items():
                finite(f"dispatch_s[{device!r}].{name}", value)
        for device, seconds in self.update_s.items():
            finite(f"update_s[{device!r}]", seconds)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not isinstance(value, (Mapping, Experts)):
                finite(field.name, value)
        if self.slot_bytes > self.fixed_bytes:
            raise argument_error(
                "slot_bytes", self.slot_bytes, f"{self.fixed_bytes:g} at most, all bytes"
            )
        for name in _SHARED if self.experts is not None else ():
            part, whole = getattr(self.experts, name), getattr(self, name)
            if part > whole:
                raise argument_error(f"experts.{name}", part, f"{whole:g} at most, the layer's")

    @property
    def shapes(self) -> Collection[tuple[int, int]]:
        return {(case.tensor, case.microbatch) for case in self.seconds}

    @property
    def expert_degrees(self) -> Collection[int]:
        return {case.experts for case in self.seconds} if self.experts is not None else {1}

    @property
    def can_recompute(self) -> bool:
        return self.input_bytes is not None

    @property
    def can_shard_slots(self) -> bool:
        return self.slot_bytes > 0

    @property
    def can_offload_slots(self) -> bool:
        return self.slot_bytes > 0

    def has(self, device: str, layout: LayerLayout) -> bool:
        return self._case(device, layout) in self.seconds

    def _case(self, device: str, layout: LayerLayout) -> ProfileKey:
        """Return the key of its profile; experts count only if it has some."""
        experts = layout.experts if self.experts is not None else 1
        return ProfileKey(device, layout.tensor, layout.microbatch, experts)

    def cost(self, layout: LayerLayout) -> LayerCost:
        """Return the cost by the degrees of `layout`; axes are `GROUPS`, `EXPERTS` and `TENSOR`.

        Ranks exchange as much in the backward pass as in the forward pass.

        Raises:
            PlanError: the layer is to be computed again, and cannot be.
        """
        exchanged = self._exchanged(layout)
        sums, gathers = self._summed(layout)
        kept = self.kept_bytes * layout.microbatch / layout.tensor
        again = 0.0
        if layout.recompute:
            if self.input_bytes is None:
                raise PlanError("A layer is to be computed again, but has no input_bytes.")
            kept, again = self.input_bytes * layout.microbatch, kept
        away = self._slot_bytes(layout) if layout.offload_slots else 0.0
        sent = self.sent_bytes * layout.microbatch
        return LayerCost(
            (layout.data // layout.experts, layout.experts, layout.tensor),
            {
                case.device: passes
                for case, passes in self.seconds.items()
                if case == self._case(case.device, layout)
            },
            exchanged,
            exchanged,
            sums,
            gathers,
            {device: seconds * self._updated(layout) for device, seconds in self.update_s.items()},
            together=1 if self.experts is None else layout.experts,
            fixed_bytes=self._held_bytes(layout) - away,
            kept_bytes=kept,
            working_bytes=max(again, away - kept),  # by the update nothing is kept any more
            sent_bytes=sent,
            returned_bytes=sent,
            host_bytes=away,
            dispatch_s=self.dispatch_s,
        )

    def _updated(self, layout: LayerLayout) -> float:
        """The part of its slots that a rank has, and so of its weights that it updates."""
        return self._slot_bytes(layout) / self.slot_bytes if self.slot_bytes else 1 / layout.tensor

    def _exchanged(self, layout: LayerLayout) -> tuple[LayerExchange, ...]:
        """In a pass of a microbatch: tensor ranks sum, and tokens go to their experts and back."""
        found = []
        if self.reduced_bytes:
            num_bytes = layout.microbatch * self.reduced_bytes
            found.append(LayerExchange("all_reduce", (TENSOR,), num_bytes))
        if self.experts is not None:
            num_bytes = layout.microbatch * self.experts.routed_bytes
            found.append(LayerExchange("all_to_all", (EXPERTS,), num_bytes, 2))
        return tuple(found)

    def _summed(
        self, layout: LayerLayout
    ) -> tuple[tuple[LayerExchange, ...], tuple[LayerExchange, ...]]:
        """Once a step: copies sum gradients. Where they share the slots out, each gets the sum of
        its part alone, and all gather the weights."""
        own = self.experts or Experts()
        shards = layout.shard_slots
        sums = _along_copies(
            "reduce_scatter" if shards else "all_reduce",
            layout,
            self.gradient_bytes - own.gradient_bytes,
            own.gradient_bytes,
        )
        if not shards:
            return sums, ()
        dense = self.weight_bytes - own.weight_bytes
        return sums, _along_copies("all_gather", layout, dense, own.weight_bytes)

    def _held_bytes(self, layout: LayerLayout) -> float:
        """That a rank stores all the time. Of experts it has its part alone, whose slots only the
        copies with the same part share."""
        shards, experts = layout.shard_slots, self.experts
        if experts is None:
            held = _with_slots(self.fixed_bytes, self.slot_bytes if shards else 0.0, layout.data)
            return held / layout.tensor
        slots, own = (self.slot_bytes, experts.slot_bytes) if shards else (0.0, 0.0)
        dense = _with_slots(self.fixed_bytes - experts.fixed_bytes, slots - own, layout.data)
        groups = layout.data // layout.experts
        part = _with_slots(experts.fixed_bytes, own, groups) / layout.experts
        return (dense + part) / layout.tensor

    def _slot_bytes(self, layout: LayerLayout) -> float:
        """That a rank has of the slots of the optimizer; see `_held_bytes`."""
        own = 0.0 if self.experts is None else self.experts.slot_bytes
        dense, own = self.slot_bytes - own, own / layout.experts
        if layout.shard_slots:
            dense, own = dense / layout.data, own / (layout.data // layout.experts)
        return (dense + own) / layout.tensor


def _with_slots(fixed: float, slots: float, copies: int) -> float:
    """Bytes of a rank if copies share these slots out."""
    return fixed - slots + slots / copies


def _along_copies(
    kind: str, layout: LayerLayout, dense: float, own: float
) -> tuple[LayerExchange, ...]:
    """Of bytes that all copies have of the whole layer, and of those of experts."""
    dense /= layout.tensor
    own /= layout.tensor * layout.experts
    if layout.experts == 1:
        return (LayerExchange(kind, (GROUPS,), dense + own),)
    return LayerExchange(kind, (GROUPS, EXPERTS), dense), LayerExchange(kind, (GROUPS,), own)


@dataclasses.dataclass(frozen=True)
class LayerCostTable:
    """The layers of a model, each of which reads of the one before.

    Attributes:
        kinds: by name.
        layers: the kind of each, in order.
        sums_overlap: gradients may be summed layer by layer during the backward pass.

    Raises:
        PlanError: there is no layer, or one of an unknown kind.
    """

    kinds: Mapping[str, Kind]
    layers: tuple[str, ...]
    sums_overlap: bool = True
    _costs: dict[tuple[str, LayerLayout], LayerCost] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("A table without layers: give one at least.")
        for name in self.layers:
            if name not in self.kinds:
                raise PlanError(
                    f"A layer is of kind {name!r}; there are {', '.join(map(repr, self.kinds))}."
                )

    def __len__(self) -> int:
        return len(self.layers)

    def cost(self, name: str, layout: LayerLayout) -> LayerCost:
        """Return the cost of a layer of this kind; it is found once.

        Raises:
            PlanError: it cannot be had so.
        """
        key = name, layout
        if key not in self._costs:
            self._costs[key] = self.kinds[name].cost(layout)
        return self._costs[key]

    def cost_of(self, layer: int, layout: LayerLayout) -> LayerCost:
        """Return the cost of one of the layers."""
        return self.cost(self.layers[layer], layout)

    def passes(self, name: str, device: str, layout: LayerLayout) -> Passes:
        """Return the seconds of a layer of this kind, without what ranks exchange.

        Raises:
            PlanError: the table has no time for this case.
        """
        found = self.cost(name, layout).seconds.get(device)
        if found is None:
            experts = f", experts over {layout.experts} copies" if layout.experts > 1 else ""
            raise PlanError(
                f"Layers of kind {name!r} have no time on {device!r} with tensor degree "
                f"{layout.tensor} and microbatches of {layout.microbatch}{experts}."
            )
        return found

    @property
    def used(self) -> list[Kind]:
        """The kinds that there are layers of."""
        return [self.kinds[name] for name in dict.fromkeys(self.layers)]

    def has(self, devices: Iterable[str], layout: LayerLayout) -> bool:
        """Whether all layers have a cost for it on all these devices."""
        used = self.used
        return all(kind.has(device, layout) for device in devices for kind in used)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The tensor degrees and microbatch sizes that there may be costs for."""
        return sorted(self.kinds[self.layers[0]].shapes)

    @property
    def expert_degrees(self) -> list[int]:
        """Over how many copies the experts of its layers can be spread: 1, and what it has times
        of."""
        return sorted({1}.union(*(kind.expert_degrees for kind in self.used)))

    @property
    def can_recompute(self) -> bool:
        """Whether every layer can be computed again in the backward pass."""
        return all(kind.can_recompute for kind in self.used)

    @property
    def can_shard_slots(self) -> bool:
        """Whether copies can share slots of any layer out."""
        return any(kind.can_shard_slots for kind in self.used)

    @property
    def can_offload_slots(self) -> bool:
        """Whether slots of any layer can lie in host memory."""
        return any(kind.can_offload_slots for kind in self.used)
