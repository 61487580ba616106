"""Packing of collectives that run at the same time: one collective starts once (TAP §IV-G).

Collectives of one kind and group whose tensors are moved together (`Roles.together`) share a bucket
when the step is written. Three gathers of 1 MB each that start in 10 us and take 100 us more are
priced as one of 3 MB, at 310 us and not 330.

What packing saves is no sum over collectives, but what it hangs on is: how many there are of each
set, their bytes, and what they take one by one. So sets of parts of a step can be added up.

A bucket is taken to hold what is packed: where it does not, so many bytes are moved that another
start is little beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tfpar.cost.collectives import PACKED_KINDS
from tfpar.ir.gathered_weights import is_prefetched
from tfpar.ir.roles import Roles
from tfpar.propagation.reshard import Communication


class PackingKey(NamedTuple):
    """Set of collectives that are packed into one, if there are several.

    Attributes:
        group: of the tensors that they move, as in `Roles.together`.
        kind, axes: of the collectives.
        phase: whose ops wait for them.
        times: how many such sets of the model this one stands for.
        runs: how often a step runs each of these.
        prefetched: they may run beside the ops of their phase.
    """

    group: int
    kind: str
    axes: tuple[int, ...]
    phase: int
    times: int
    runs: int = 1
    prefetched: bool = False

    @classmethod
    def of(
        cls,
        moved: Communication,
        roles: Roles,
        axes: tuple[int, ...],
        phase: int,
        times: int,
        runs: int = 1,
    ) -> PackingKey | None:
        """Find the set that a collective is of; None if it runs by itself."""
        group = roles.together.get(moved.tensor) if moved.tensor is not None else None
        if group is None or moved.kind not in PACKED_KINDS:
            return None
        return cls(group, moved.kind, axes, phase, times, runs, is_prefetched(moved.op))


class PackingGain(NamedTuple):
    """Time and starts that packing saves.

    Attributes:
        phase: as of the set.
        seconds: in all; of one run, if there are several.
        fewer: by how many collectives there are fewer, in all runs.
        prefetched: as of the set.
    """

    phase: int
    seconds: float
    fewer: int
    prefetched: bool = False


_Sum = tuple[int, int, float]
"""Number of collectives, their bytes, and their seconds, each by itself."""


class PackingSets(dict[PackingKey, _Sum]):
    """Sets of collectives that are packed, as a value: sums of it are others."""

    __slots__ = ()

    @classmethod
    def one(cls, packable: PackingKey, num_bytes: int, seconds: float) -> PackingSets:
        """Make the sums of one collective.

        Args:
            num_bytes: its payload.
            seconds: what it takes by itself.
        """
        return cls({packable: (1, num_bytes, seconds)})

    def plus(self, other: PackingSets, times: int = 1) -> PackingSets:
        """Add those of another part of the step, so many times; subtract them if -1."""
        found = PackingSets(self)
        for packable, (more, more_bytes, more_seconds) in other.items():
            count, num_bytes, seconds = found.get(packable, (0, 0, 0.0))
            count += times * more
            if count:
                num_bytes, seconds = num_bytes + times * more_bytes, seconds + times * more_seconds
                found[packable] = count, num_bytes, seconds
            else:
                del found[packable]
        return found

    def saved(
        self, seconds_of: Callable[[str, tuple[int, ...], int], float]
    ) -> Iterator[PackingGain]:
        """Price what packing saves of each set that has several.

        Args:
            seconds_of: what a collective takes, by kind, axes and bytes.
        """
        for packable, (count, num_bytes, seconds) in self.items():
            if count > 1:
                _, kind, axes, phase, times, runs, prefetched = packable
                less = seconds - seconds_of(kind, axes, num_bytes)
                yield PackingGain(phase, times * less, times * (count - 1) * runs, prefetched)


NOTHING = PackingSets()
