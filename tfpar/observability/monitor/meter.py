"""Meter of training steps: real time, from the end of one to the end of the next."""

from __future__ import annotations

import collections
import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

WARM_UP = 1
"""Calls left out after one in which something was compiled: what runs for the first time may still
be prepared by the device."""


class Lap(NamedTuple):
    """One call of the train function: of one step, or of several in one execution.

    Attributes:
        ran: what each of its steps ran.
        read_s: how much of it was waited for data.
    """

    seconds: float
    ran: Sequence[Any]
    read_s: float = 0.0


class Tally:
    """Sum over several calls of the train function.

    Attributes:
        seconds: of all of them.
        read_s: how much of it was waited for data.
        ran: how often they ran what.
    """

    def __init__(self) -> None:
        self.seconds = self.read_s = 0.0
        self.ran: collections.Counter[Any] = collections.Counter()
        self._alone: dict[Any, tuple[float, int]] = {}

    def add(self, lap: Lap) -> None:
        """Count one more call."""
        self.seconds += lap.seconds
        self.read_s += lap.read_s
        self.ran.update(lap.ran)
        if len({*lap.ran}) == 1:
            one = lap.ran[0]
            seconds, steps = self._alone.get(one, (0.0, 0))
            self._alone[one] = seconds + lap.seconds, steps + len(lap.ran)

    @property
    def steps(self) -> int:
        """Number of steps that the calls ran."""
        return self.ran.total()

    @property
    def step_s(self) -> float:
        """Seconds of a step; nan if there is none."""
        return self.seconds / self.steps if self.steps else math.nan

    def step_s_of(self, one: Any) -> float:
        """The same of those in calls that ran nothing but `one`."""
        seconds, steps = self._alone.get(one, (0.0, 0))
        return seconds / steps if steps else math.nan


class Meter:
    """Timer of the calls of the train function.

    Reading data and other callbacks count, as training waits for them. What comes between `stop`
    and the next `start` does not, nor a call that runs something for the first time (it was
    compiled in it), nor `WARM_UP` calls after that.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since: float | None = None
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._left_out = 0

    def start(self) -> None:
        """A call begins; where one has ended just before, it began then."""
        if self._since is None:
            self._since = self._clock()

    def stop(self) -> None:
        """Stop timing: what follows is no training."""
        self._since = None

    def lap(self, ran: Sequence[Any], read_s: float = 0.0) -> Lap | None:
        """A call has ended that ran this and waited so long for data; None if it is not to
        count."""
        since, self._since = self._since, self._clock()
        if any(one not in self._known for one in ran):
            self._known.update(ran)
            self._left_out = WARM_UP
            return None
        if self._left_out:
            self._left_out -= 1
            return None
        return Lap(self._since - since, ran, read_s) if ran and since is not None else None
