"""Timeline of a pipeline's step as it was simulated."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from tfpar.pipeline.graph import Edge
from tfpar.pipeline.tasks import Task


class TaskSpan(NamedTuple):
    """Task from start to end, in seconds from the start of the step."""

    start: float
    end: float
    actor: int
    task: Task


class TransferSpan(NamedTuple):
    """Transfer from start to end."""

    start: float
    end: float
    edge: Edge


class ReductionSpan(NamedTuple):
    """Sum of a stage's gradients over ranks, from start to end."""

    start: float
    end: float
    stage: int


class ActorPeak(NamedTuple):
    """Peak of the bytes of a rank of an actor.

    Attributes:
        time: seconds from the start of the step, when it is first reached.
        task: whose start, or whose input on its way, it is; None: what is held all the time.
    """

    num_bytes: float
    time: float
    task: Task | None


@dataclasses.dataclass(frozen=True)
class SimulatedTimeline:
    """Simulated step of a pipeline.

    Attributes:
        seconds: until the last task ends.
        events: every task, in the order of starts.
        transfers, reductions: likewise.
        peaks: of each actor.
        memory: of each actor, (seconds, bytes from then on) whenever it changes.
        in_flight: of each stage, the most microbatches of which F has begun and B, or W, not ended.
    """

    seconds: float
    events: tuple[TaskSpan, ...]
    transfers: tuple[TransferSpan, ...]
    reductions: tuple[ReductionSpan, ...]
    peaks: tuple[ActorPeak, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]
    in_flight: tuple[int, ...]

    @functools.cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds in which each actor runs tasks."""
        busy: list[float] = [0] * len(self.peaks)
        for ran in self.events:
            busy[ran.actor] += ran.end - ran.start
        return tuple(busy)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Time that each actor waits over the time that it works; 0 of one whose tasks take no
        time."""
        return tuple((self.seconds - busy) / busy if busy else 0.0 for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """Time that all actors wait over the time that they work; 0 if no task takes time."""
        work = sum(self.busy_s)
        return self.seconds * len(self.busy_s) / work - 1 if work else 0.0
