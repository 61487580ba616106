"""Steps that all ranks take together, and the moments at which they compare notes.

At a *meeting*, after a step, the ranks compare what they were fed and learn whether any of them was
asked to stop. Meetings come after the first step of each program and about every second from
then on, at steps that follow from what was said at the last one, so that all ranks come.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfpar.launch.beacon import Reached
from tfpar.spec import RuntimeMismatchError

if TYPE_CHECKING:
    from tfpar.distributed.world import World

INTERVAL_S = 1.0
"""Seconds between meetings, roughly: one costs some milliseconds, mostly of waiting."""

_MOST_STEPS = 1000
_SAMPLED = 64  # entries of a tensor that are compared


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
        self._next = 1
        self._fed = 0
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
        first: bool,
        within: Callable[[], Reached | None] | None = None,
    ) -> Iterator[None]:
        """Take one step on tensors that have to be the same on every rank.

        Args:
            first: the program's first.
            within: tells, to another thread, how far this rank has got in it.

        Raises:
            RuntimeMismatchError: they are not.
            PeerLostError: another rank has ended.
        """
        self._fed = _checksum(fed, self._fed)
        with self._world.at(f"{name} {self.count + 1}", within):
            yield
        self.count += 1
        if first or self.count >= self._next:
            self._meet(name)

    def _meet(self, name: str) -> None:
        steps = self.count - self._met
        seconds = max(time.monotonic() - self._since, 1e-6) / steps
        message = {"fed": self._fed, "stop": self._asked_to_stop, "seconds": seconds}
        self._fed = 0
        with self._world.at(f"{name} {self.count} (comparing notes)"):
            told = self._world.exchange.messages(message)
        self.stop = any(t["stop"] for t in told)
        # What the first steps take says little: they compile.
        pace = max(t["seconds"] for t in told)
        ahead = int(min(INTERVAL_S / pace, 2 * self.count, _MOST_STEPS))
        begin = self._met + 1
        self._met, self._next, self._since = (
            self.count,
            self.count + max(1, ahead),
            time.monotonic(),
        )
        self._check([t["fed"] for t in told], begin)

    def _check(self, fed: Sequence[Any], begin: int) -> None:
        other = next((r for r, value in enumerate(fed) if value != fed[0]), None)
        if other is None:
            return
        raise RuntimeMismatchError(
            f"Ranks 0 and {other} were fed different batches in steps {begin} to "
            f"{self.count}. Every rank has to read the same data in the same order and takes its "
            f"part by itself: seed what is random (np.random.default_rng() without a seed is "
            f"not), do not shard by rank, or pass what is sharded through tap.shard_data."
        )


def _checksum(tensors: Sequence[tf.Tensor], start: int) -> int:
    """Of the shapes, and of some entries of each tensor."""
    for tensor in tensors:
        value = tensor.numpy() if hasattr(tensor, "numpy") else np.zeros(0)
        flat = np.asarray(value).reshape(-1)
        some = flat[:: max(1, flat.size // _SAMPLED)]
        data = repr(some.tolist()) if some.dtype == object else some.tobytes()
        text = data.encode() if isinstance(data, str) else data
        start = zlib.crc32(text, zlib.crc32(repr(value.shape).encode(), start))
    return start
