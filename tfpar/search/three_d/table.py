"""`LayerTable`: what the layers of a model take and store, measured or computed, as plain values.

Times are by device, tensor degree and microbatch size, because none of them follows from another:
a smaller part of a matrix product runs at a smaller part of a device's rate. What ranks exchange is
given in bytes, and priced on the links that they have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from tfpar.spec import PlanError
from tfpar.spec.arguments import finite, refused


class Case(NamedTuple):
    """What the time of a layer depends on.

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


class Passes(NamedTuple):
    """Seconds of the forward and of the backward pass of a microbatch."""

    forward: float
    backward: float


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


_SHARED = ("fixed_bytes", "gradient_bytes", "slot_bytes", "weight_bytes")
"""Bytes of a layer that its experts have a part of."""


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Layers that are alike.

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
    """

    seconds: Mapping[Case, Passes]
    fixed_bytes: float = 0.0
    gradient_bytes: float = 0.0
    kept_bytes: float = 0.0
    reduced_bytes: float = 0.0
    sent_bytes: float = 0.0
    input_bytes: float | None = None
    slot_bytes: float = 0.0
    weight_bytes: float = 0.0
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for case, passes in self.seconds.items():
            for name, value in passes._asdict().items():
                finite(f"seconds[{tuple(case)}].{name}", value)
        for field in dataclasses.fields(self)[1:-1]:
            if getattr(self, field.name) is not None:
                finite(field.name, getattr(self, field.name))
        if self.slot_bytes > self.fixed_bytes:
            raise refused("slot_bytes", self.slot_bytes, f"{self.fixed_bytes:g} at most, all bytes")
        for name in _SHARED if self.experts is not None else ():
            part, whole = getattr(self.experts, name), getattr(self, name)
            if part > whole:
                raise refused(f"experts.{name}", part, f"{whole:g} at most, the layer's")

    def case(self, case: Case) -> Case:
        """What its time depends on: nothing of experts if it has none."""
        return case if self.experts is not None else case._replace(experts=1)


@dataclasses.dataclass(frozen=True)
class LayerTable:
    """The layers of a model, each of which reads of the one before.

    Attributes:
        kinds: by name.
        layers: the kind of each, in order.

    Raises:
        PlanError: there is no layer, or one of an unknown kind.
    """

    kinds: Mapping[str, LayerKind]
    layers: tuple[str, ...]

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

    def kind(self, layer: int) -> LayerKind:
        """That of one of the layers."""
        return self.kinds[self.layers[layer]]

    def passes(self, name: str, case: Case) -> Passes:
        """Seconds of a layer of this kind.

        Raises:
            PlanError: the table has no time for this case.
        """
        kind = self.kinds[name]
        found = kind.seconds.get(kind.case(case))
        if found is None:
            experts = f", experts over {case.experts} copies" if case.experts > 1 else ""
            raise PlanError(
                f"Layers of kind {name!r} have no time on {case.device!r} with tensor degree "
                f"{case.tensor} and microbatches of {case.microbatch}{experts}."
            )
        return found

    @property
    def used(self) -> list[LayerKind]:
        """The kinds that there are layers of."""
        return [self.kinds[name] for name in dict.fromkeys(self.layers)]

    def has(self, case: Case) -> bool:
        """Whether all layers have a time for it."""
        return all(kind.case(case) in kind.seconds for kind in self.used)

    @property
    def expert_degrees(self) -> list[int]:
        """Over how many copies the experts of its layers can be spread: 1, and what it has times
        of."""
        found = {
            case.experts for kind in self.used if kind.experts is not None for case in kind.seconds
        }
        return sorted(found | {1})
