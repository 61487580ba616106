"""Units of a model, which are assigned to stages, and the flows between them.

It says nothing of where units come from: `unit_builder` makes them from a training step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.planning.inter_op.stages.slowdowns import Paces
from tfpar.spec import ArgumentError
from tfpar.spec.arguments import finite, integer


@dataclasses.dataclass(frozen=True)
class Unit:
    """Part of a model that is assigned to one stage.

    Attributes:
        name: for messages.
        seconds: that its forward and backward pass take, of a whole batch, on a stage of pace 1.
        weight_bytes: of the weights that it is the first to read.
        kept_bytes: of what it makes of a whole batch that backward passes read.
        stage: where it has to be; None: anywhere.
        loop: the longest of its loops in words, each of which runs in one stage as a whole; empty
            where it has none.
    """

    name: str
    seconds: float = 0.0
    weight_bytes: float = 0.0
    kept_bytes: float = 0.0
    stage: int | None = None
    loop: str = ""

    def __post_init__(self) -> None:
        finite("seconds", self.seconds)
        finite("weight_bytes", self.weight_bytes)
        finite("kept_bytes", self.kept_bytes)
        if self.stage is not None:
            integer("stage", self.stage, 0)


@dataclasses.dataclass(frozen=True)
class Flow:
    """A tensor that one unit makes and others read: it is sent once to each stage that reads it,
    straight from its maker.

    Attributes:
        source: the place of its maker among the units.
        readers: the places of others; they come in no earlier stage.
        num_bytes: that a step sends to a stage: the tensor, and its gradient back.
    """

    source: int
    readers: tuple[int, ...]
    num_bytes: float

    def __post_init__(self) -> None:
        finite("num_bytes", self.num_bytes)
        if not self.readers or self.source in self.readers:
            raise ArgumentError(f"A flow leads from a unit to others: {self} does not.")


@dataclasses.dataclass(frozen=True)
class TiedWeight:
    """A weight that several units read, such as an embedding that the logits use too.

    One of the stages that read it owns it; each other gets it and sends its gradient, once a step.

    Attributes:
        readers: places of units.
        num_bytes: that a step sends to and from a stage that does not own it.
    """

    readers: tuple[int, ...]
    num_bytes: float

    def __post_init__(self) -> None:
        finite("num_bytes", self.num_bytes)
        if not self.readers:
            raise ArgumentError("A tied weight has no readers.")


@dataclasses.dataclass(frozen=True)
class UnitGraph:
    """The units of a model, in an order in which each reads of earlier ones only.

    Raises:
        ArgumentError: a flow leads to an earlier unit, or names one that there is not.
    """

    units: tuple[Unit, ...]
    flows: tuple[Flow, ...] = ()
    ties: tuple[TiedWeight, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.units)
        if not count:
            raise ArgumentError("There are no units to assign to stages.")
        for flow in self.flows:
            if not 0 <= flow.source < min(flow.readers) or max(flow.readers) >= count:
                raise ArgumentError(
                    f"{flow} is refused: there are {count} units, and each reads of earlier ones "
                    f"only."
                )
        for tie in self.ties:
            if min(tie.readers) < 0 or max(tie.readers) >= count:
                raise ArgumentError(f"{tie} is refused: there are {count} units.")

    @property
    def seconds(self) -> float:
        """Of all units, on a stage of pace 1."""
        return sum(unit.seconds for unit in self.units)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(maker, reader), each pair once."""
        return tuple(dict.fromkeys((f.source, r) for f in self.flows for r in f.readers))

    def stage_seconds(self, stages: Sequence[int], paces: Paces) -> list[float]:
        """Return the seconds of each stage at its pace, with units in these stages."""
        found = [0.0] * len(paces)
        for unit, stage in zip(self.units, stages, strict=True):
            found[stage] += unit.seconds * paces[stage]
        return found

    def sent_bytes(self, stages: Sequence[int]) -> float:
        """Return the bytes that a step sends between stages, with units in these stages."""
        total = 0.0
        for flow in self.flows:
            total += flow.num_bytes * len({stages[r] for r in flow.readers} - {stages[flow.source]})
        for tie in self.ties:
            total += tie.num_bytes * (len({stages[r] for r in tie.readers}) - 1)
        return total
