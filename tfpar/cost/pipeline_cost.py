"""Cost of a step of several stages, as plans carry it and reports show it."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from tfpar.spec.quantities import Amount, Count


@dataclasses.dataclass(frozen=True)
class StageCost:
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

    ranks: tuple[Count, ...]
    forward_s: Amount
    backward_s: Amount
    update_s: Amount
    reduction_s: Amount
    bubble: Amount
    sent_bytes: Amount
    in_flight: Count
    fixed_bytes: Amount
    kept_bytes: Amount
    peak_bytes: Amount
    peak_task: str
    limit_bytes: Amount | None = None
    host_bytes: Amount = 0.0
    host_limit_bytes: Amount | None = None

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


@dataclasses.dataclass(frozen=True)
class ScheduleCost:
    """Cost of a step in a schedule.

    Attributes:
        name: of its family; or `LIST`.
        seconds: of a step.
        memory_bytes: the most that a rank holds.
        excess_bytes: the most that a rank would need beyond what it may hold; 0: all fits.
    """

    name: str
    seconds: Amount
    memory_bytes: Amount
    excess_bytes: Amount = 0.0


class TaskTime(NamedTuple):
    """Span of a task of a simulated step: `2F0`, as `pipeline.tasks.Task` writes it."""

    start_s: Amount
    end_s: Amount
    task: str


class SendTime(NamedTuple):
    """Span of a transfer to another stage of what a task has made."""

    start_s: Amount
    end_s: Amount
    task: str
    target: Count
    num_bytes: Amount


class ReductionTime(NamedTuple):
    """Span in which the gradients of a stage are summed over its ranks."""

    start_s: Amount
    end_s: Amount
    stage: Count


LIST = "list"
"""The name of a schedule that list scheduling has made (`pipeline.generators.list_scheduling`)."""


@dataclasses.dataclass(frozen=True)
class PipelineCost:
    """Cost of a step of several stages.

    Attributes:
        seconds: of a step.
        bubble: the time that ranks wait, divided by the time that they work.
        stages: in their order.
        schedules: those that the plan's was picked from, itself the first, in equal shares of the
            batch; empty where the user gave it.
        tasks, sends, reductions: when each runs in the simulated step, by their starts.
    """

    seconds: Amount
    bubble: Amount
    stages: tuple[StageCost, ...]
    schedules: tuple[ScheduleCost, ...] = ()
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
