"""Steps that all ranks take together, and the moments at which they compare notes.

At a *meeting*, after a step, the ranks compare what they were fed and what they hold in common, and
learn whether any of them was asked to stop. Meetings come after the first step of each program and
about every second from then on, at steps that follow from what was said at the last one, so that
all ranks come.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from tfpar.jobs.launch import activities
from tfpar.jobs.launch.beacon import TaskProgress
from tfpar.spec import RuntimeMismatchError
from tfpar.tf.distributed.input_log import InputLog, difference, first_differing

if TYPE_CHECKING:
    from tfpar.tf.distributed.world import World

INTERVAL_S = 1.0
"""Seconds between meetings, roughly: one costs some milliseconds, mostly of waiting."""

_MOST_STEPS = 1000
SHARE = 0.01
"""Of the time, what looking at what is fed may take, and comparing what is held."""

_NOTHING_S = 5e-4  # what it may take at any rate: 1 % of a step of 50 ms
_BYTES_PER_S = 5e9  # that are looked at, where memory is slow


class SharedDraw(Protocol):
    """State that all ranks hold copies of; implemented by `tf.runtime.shared_state`."""

    def compare(self, when: str, turn: int | None = None) -> None: ...


class Lockstep:
    """The steps of this rank.

    Attributes:
        count: steps taken.
        stop: agreed upon by all: after this step the job shall end in good order.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.count = 0
        self.stop = False
        self._asked_to_stop = False
        self._met = 0  # steps taken at the last meeting
        self._meetings = 0
        self._comparisons = _Comparisons()
        self._next = 1
        self._fed = InputLog()
        self._since = time.monotonic()

    def ask_to_stop(self) -> None:
        """Propose to stop; every rank learns of it at the next meeting. For signal handlers."""
        self._asked_to_stop = True

    @contextlib.contextmanager
    def step(
        self,
        name: str,
        fed: Sequence[tf.Tensor],
        *,
        part: str = "",
        shared: Callable[[], SharedDraw],
        first: bool,
        within: Callable[[], TaskProgress | None] | None = None,
    ) -> Iterator[None]:
        """Take one step.

        Args:
            fed: what has to be the same on every rank that is given the same part.
            part: names the part of a batch that this rank is given; `""` if it is given all.
            shared: gives what ranks hold in common after it.
            first: the program's first.
            within: tells, to another thread, how far this rank has got in it.

        Raises:
            RuntimeMismatchError: ranks were fed different batches, or hold different values of
                what they hold in common.
            PeerLostError: another rank has ended.
        """
        number = self.count + 1
        activity = activities.step(name, number)
        self._fed.note(activity, number, fed, part)
        with self._world.at(activity, within):
            yield
        self.count = number
        self._world.beacon.took(number)
        if first or self.count >= self._next:
            self._meet(name, shared(), first)

    def _meet(self, name: str, shared: SharedDraw, first: bool) -> None:
        steps = self.count - self._met
        seconds = max(time.monotonic() - self._since, 1e-6) / steps
        message = {
            "fed": self._fed.digest,
            "bytes": self._fed.step_bytes,
            "stop": self._asked_to_stop,
            "seconds": seconds,
            "comparing": self._comparisons.told(shared),
        }
        with self._world.at(f"{name} {self.count} (comparing notes)"):
            told = self._world.exchange.messages(message)
            self.stop = any(t["stop"] for t in told)
            # What the first steps take says little: they compile.
            pace = max(t["seconds"] for t in told)
            ahead = int(min(INTERVAL_S / pace, 2 * self.count, _MOST_STEPS))
            self._met, self._next = self.count, self.count + max(1, ahead)
            self._meetings += 1
            try:
                self._check(told)
            finally:
                self._fed.restart(blocks(max(t["bytes"] for t in told), pace))
            if first or _is_due([t["comparing"] for t in told]):
                when = _in_steps(name, self._comparisons.step + 1, self.count)
                with self._comparisons.timed(shared, self.count):
                    shared.compare(when, None if first else self._meetings)
        self._since = time.monotonic()

    def _check(self, told: Sequence[dict[str, Any]]) -> None:
        """Check that ranks that were given the same parts were fed the same."""
        found = _first_pair([t["fed"] for t in told])
        if found is None:
            return
        part, first, other = found
        digests = self._world.exchange.messages(self._fed.digests(part))
        at = first_differing(digests[first], digests[other])
        steps = self._world.exchange.messages(self._fed.step(part, at))
        raise RuntimeMismatchError(
            f"Ranks {first} and {other} were fed different batches in {steps[first]['name']}: "
            f"{difference(steps[first], steps[other])}. Every rank has to read the same data in "
            f"the same order and takes its part by itself: seed what is random "
            f"(np.random.default_rng() without a seed is not), do not shard by rank, or pass what "
            f"is sharded through tap.shard_data."
        )


class _Comparisons:
    """Schedule of the comparisons of shared state: when the last one was, and what they take."""

    def __init__(self) -> None:
        self._took: weakref.WeakKeyDictionary[SharedDraw, list[float]] = weakref.WeakKeyDictionary()
        self._at = time.monotonic()
        self.step = 0  # after which it was

    def told(self, shared: SharedDraw) -> tuple[float, float]:
        """Seconds that it takes, 0 as long as that is not known, and since the last time."""
        # At first all is compared, then made what compares a part.
        took = self._took.get(shared, [])[2:]
        return took[-1] if took else 0.0, time.monotonic() - self._at

    @contextlib.contextmanager
    def timed(self, shared: SharedDraw, step: int) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self._at, self.step = time.monotonic(), step
            took = self._took.setdefault(shared, [])
            took.append(self._at - begin)
            del took[3:-1]


def _is_due(told: Sequence[tuple[float, float]]) -> bool:
    """Whether what ranks say of comparisons leaves time for another."""
    return max(took for took, _ in told) <= SHARE * max(ago for _, ago in told)


def _in_steps(name: str, first: int, last: int) -> str:
    return f"in {name} {first}" if first == last else f"in {name}s {first} to {last}"


def blocks(num_bytes: float, seconds: float) -> int:
    """Return how many blocks of samples there are, of which each step looks at one.

    Args:
        num_bytes: that a step is fed.
        seconds: that it takes.
    """
    return max(1, math.ceil(num_bytes / _BYTES_PER_S / max(SHARE * seconds, _NOTHING_S)))


def _first_pair(digests: Sequence[dict[str, str]]) -> tuple[str, int, int] | None:
    """A part, and two ranks that were given it and have seen another; None if there are none."""
    first_of: dict[str, int] = {}
    for rank, by_part in enumerate(digests):
        for part, digest in by_part.items():
            first = first_of.setdefault(part, rank)
            if digests[first][part] != digest:
                return part, first, rank
    return None
