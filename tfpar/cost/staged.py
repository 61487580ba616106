"""Cost of a step of several stages, as plans carry it and reports show it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tfpar.spec.arguments import finite, integer, listed, refused


@dataclasses.dataclass(frozen=True)
class StageShare:
    """Cost of a stage: seconds (`_s`), and bytes of one rank.

    Attributes:
        ranks: that run it.
        forward_s, backward_s: of one microbatch.
        update_s: of a step, with what runs once as it begins.
        reduction_s: that the sum of gradients over its ranks takes.
        bubble: the time that its ranks wait, divided by the time that they work; 0 if they have no
            work.
        sent_bytes: that a rank sends to other stages in a step.
        in_flight: the most microbatches at once.
        fixed_bytes: held all the time: weights, slots, sums of gradients.
        kept_bytes: of a microbatch in flight.
        peak_bytes: the most that a rank holds, of all its stages.
        peak_task: what it runs, or is sent something for, then; empty if it never holds more than
            `fixed_bytes`.
        limit_bytes: that a rank may hold: the least of its devices; None where that is not known.
        host_bytes: that a rank has in the memory of its host, of all its stages.
        host_limit_bytes: that it may have there; None where that is not known.
    """

    ranks: tuple[int, ...]
    forward_s: float
    backward_s: float
    update_s: float
    reduction_s: float
    bubble: float
    sent_bytes: float
    in_flight: int
    fixed_bytes: float
    kept_bytes: float
    peak_bytes: float
    peak_task: str
    limit_bytes: float | None = None
    host_bytes: float = 0.0
    host_limit_bytes: float | None = None

    @property
    def host_excess_bytes(self) -> float:
        """Bytes of a rank in host memory beyond its limit."""
        room = math.inf if self.host_limit_bytes is None else self.host_limit_bytes
        return max(0.0, self.host_bytes - room)

    @property
    def excess_bytes(self) -> float:
        """Bytes that a rank holds beyond its limit; below 0, bytes that it could hold more."""
        return -math.inf if self.limit_bytes is None else self.peak_bytes - self.limit_bytes

    @property
    def filled(self) -> float:
        """Part of its limit that a rank holds at its peak; 0 where that is not known, or if it
        holds nothing."""
        if self.limit_bytes is None or not self.peak_bytes:
            return 0.0
        return self.peak_bytes / self.limit_bytes if self.limit_bytes else math.inf

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> StageShare:
        """Restore a stage's cost from JSON: the inverse of `dataclasses.asdict`.

        Raises:
            ArgumentError: a field is no such number.
            TypeError: a field is missing or not known.
        """
        return cls(**_read("stages", cls, fields))


@dataclasses.dataclass(frozen=True)
class SchedulePrice:
    """Cost of a step in a schedule.

    Attributes:
        name: of its family; or `LIST`.
        seconds: of a step.
        memory_bytes: the most that a rank holds.
        excess_bytes: the most that a rank would need beyond what it may hold; 0: all fits.
    """

    name: str
    seconds: float
    memory_bytes: float
    excess_bytes: float = 0.0

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> SchedulePrice:
        """Restore it from JSON, as `StageShare.of` does."""
        return cls(**_read("schedules", cls, fields))


class TaskTime(NamedTuple):
    """Span of a task of a simulated step: `2F0`, as `pipeline.tasks.Task` writes it."""

    start_s: float
    end_s: float
    task: str


class SendTime(NamedTuple):
    """Span of a transfer to another stage of what a task has made."""

    start_s: float
    end_s: float
    task: str
    target: int
    num_bytes: float


class ReductionTime(NamedTuple):
    """Span in which the gradients of a stage are summed over its ranks."""

    start_s: float
    end_s: float
    stage: int


LIST = "list"
"""The name of a schedule that list scheduling has made (`pipeline.generators.listed`)."""


@dataclasses.dataclass(frozen=True)
class StagedCost:
    """Cost of a step of several stages.

    Attributes:
        seconds: of a step.
        bubble: the time that ranks wait, divided by the time that they work.
        stages: in their order.
        schedules: those that the plan's was picked from, itself the first, in equal shares of the
            batch; empty where the user gave it.
        tasks, sends, reductions: when each runs in the simulated step, by their starts.
    """

    seconds: float
    bubble: float
    stages: tuple[StageShare, ...]
    schedules: tuple[SchedulePrice, ...] = ()
    tasks: tuple[TaskTime, ...] = dataclasses.field(default=(), compare=False, repr=False)
    sends: tuple[SendTime, ...] = dataclasses.field(default=(), compare=False, repr=False)
    reductions: tuple[ReductionTime, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def fullest(self) -> int:
        """Stage whose ranks are nearest to their limit."""
        shares = self.stages
        return max(range(len(shares)), key=lambda s: (shares[s].filled, shares[s].peak_bytes))

    @property
    def fits(self) -> bool:
        """Whether each stage fits into the memory of its own devices and their hosts, as far as
        that is known."""
        return all(s.excess_bytes <= 0 and not s.host_excess_bytes for s in self.stages)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> StagedCost:
        """Restore it from JSON: the inverse of `dataclasses.asdict`.

        Raises:
            ArgumentError: a field is no such number.
            TypeError: a field is missing or not known.
        """
        return cls(**_read("staged", cls, fields))


def _read(what: str, cls: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(fields, Mapping):
        raise refused(what, fields, "an object with fields")
    known = {f.name: str(f.type) for f in dataclasses.fields(cls)}
    return {
        name: _READERS[known[name]](f"{what}.{name}", value) if name in known else value
        for name, value in fields.items()
    }


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refused(name, value, "text")
    return value


def _row(name: str, value: Any, *readers: Callable[[str, Any], Any]) -> list[Any]:
    """The fields of one row of a list, each by its reader."""
    found = listed(name, value, f"a list of {len(readers)}")
    if len(found) != len(readers):
        raise refused(name, value, f"a list of {len(readers)}")
    return [read(name, one) for read, one in zip(readers, found, strict=True)]


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "float": finite,
    "float | None": lambda name, value: None if value is None else finite(name, value),
    "int": integer,
    "str": _text,
    "tuple[int, ...]": lambda name, value: tuple(
        integer(name, one) for one in listed(name, value, "a list of ranks")
    ),
    "tuple[StageShare, ...]": lambda name, value: tuple(
        StageShare.of(one) for one in listed(name, value, "a list of stages")
    ),
    "tuple[SchedulePrice, ...]": lambda name, value: tuple(
        SchedulePrice.of(one) for one in listed(name, value, "a list of schedules")
    ),
    "tuple[TaskTime, ...]": lambda name, value: tuple(
        TaskTime(*_row(name, one, finite, finite, _text))
        for one in listed(name, value, "a list of tasks")
    ),
    "tuple[SendTime, ...]": lambda name, value: tuple(
        SendTime(*_row(name, one, finite, finite, _text, integer, finite))
        for one in listed(name, value, "a list of what is sent")
    ),
    "tuple[ReductionTime, ...]": lambda name, value: tuple(
        ReductionTime(*_row(name, one, finite, finite, integer))
        for one in listed(name, value, "a list of sums")
    ),
}
"""Reader of a field, by its type."""
