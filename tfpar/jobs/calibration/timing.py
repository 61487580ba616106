"""Times of programs, agreed upon by all ranks."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfpar.compile.local.local_graph import LocalProgram
from tfpar.compile.local.programs import Group, ProgramSet
from tfpar.tf.runtime.executable import link
from tfpar.tf.runtime.ranks import Ranks

Chain = Callable[[int], LocalProgram]
"""Makes a chain of so many links."""


class TimedRunner(Protocol):
    """Runner of a program: runs it so many times, on all ranks at once, and returns the seconds."""

    def __call__(self, calls: int = 1, /) -> float: ...


# What a chain should take, run several times if need be: as long as the ops of a step do without a
# break. For on a busy machine short bursts are let through, and where a quota of cores is granted
# by the tenth of a second, so are longer ones. At least so long that it is told from the noise of a
# call.
_LINKS_S, _LEAST_LINKS_S = 0.1, 3e-3
_LONGEST = 64  # links: compiling them takes time, too
_CALL_S = 0.1  # what a call costs does not matter beside a link of this length
_FEWEST, _MOST = 3, 15  # runs


class Timer:
    """Timer of programs on all ranks at once; its results are equal on every rank.

    Args:
        ranks: that run the programs.
        budget_s: what all of it may take, in seconds.
        groups: of ranks that each run a program of their own, all at the same time; by default all
            ranks run one.

    Attributes:
        step_s: seconds that a program takes which holds nothing.
    """

    def __init__(self, ranks: Ranks, budget_s: float, groups: Sequence[Group] = ()) -> None:
        self._ranks = ranks
        self._groups = groups or [tuple(range(len(ranks.devices)))]
        self._end = time.monotonic() + budget_s
        self._on_gpu = "GPU" in ranks.devices[0]
        self.step_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left; of the rank that has the least."""
        return -self._agreed([time.monotonic() - self._end])[0]

    def measure_step(self, empty: LocalProgram) -> None:
        """Time a program that holds nothing."""
        run = self._runner(lambda: empty)
        self.step_s = _typical(self._agreed([run() for _ in range(_MOST)]))

    def seconds(self, chain: Chain, allowed_s: float) -> float:
        """Seconds that a chain takes for each of its links, on the slowest rank.

        Args:
            allowed_s: about how long it may take.
        """
        return max(self.by_rank(chain, allowed_s))

    def by_rank(self, chain: Chain, allowed_s: float) -> list[float]:
        """Seconds that a chain takes for each of its links, on each rank.

        The difference of two chains, one twice as long, knows nothing of what a call costs.

        Args:
            allowed_s: about how long it may take.
        """
        start = time.monotonic()
        each = self._once(self._runner(lambda: chain(1)))
        once = max(each)
        if once > max(_CALL_S, 100 * self.step_s):
            return each
        links_s = max(_LEAST_LINKS_S, min(_LINKS_S, allowed_s / (4 * _FEWEST)))
        length, taken = 0, 0.0
        while taken < links_s / 2 and length < _LONGEST:  # the first link alone says little
            length = max(length + 1, min(_LONGEST, math.ceil(links_s / once)))
            short = self._runner(functools.partial(chain, length))
            taken = max(self._once(short))
            once = taken / length
        long = self._runner(lambda: chain(2 * length))
        calls = max(1, round(links_s / (taken + self.step_s)))
        (spent,) = self._agreed([time.monotonic() - start])
        runs = int((allowed_s - spent) / (calls * (3 * taken + 4 * self.step_s)))
        times = [(short(calls), long(calls)) for _ in range(max(_FEWEST, min(_MOST, runs)))]
        told = self._told([t for pair in times for t in pair])
        return [self._link_s(flat[::2], flat[1::2], calls * length, calls) for flat in told]

    def _link_s(
        self, short: Sequence[float], long: Sequence[float], links: int, calls: int
    ) -> float:
        """Return the seconds of a link of a chain.

        Args:
            short: seconds of runs of `links` links in so many calls.
            long: seconds of runs of twice as many.
        """
        longer, shorter = _typical(long), _typical(short)
        # Noise may have made the shorter one last longer: then what is known is a bound.
        whole = max(longer - calls * self.step_s, 1e-9)
        return (longer - shorter) / links if longer > shorter else whole / (2 * links)

    def whole(self, program: LocalProgram, allowed_s: float) -> float:
        """Seconds of a program beyond what any costs, on the slowest rank."""
        return max(self.whole_by_rank(program, allowed_s))

    def whole_by_rank(self, program: LocalProgram, allowed_s: float) -> list[float]:
        """Seconds of a program beyond what any costs, on each rank."""
        run = self._runner(lambda: program)
        (first,) = self._agreed([run()])
        runs = max(_FEWEST, min(_MOST, int(allowed_s / first)))
        told = self._told([run() for _ in range(runs)])
        return [max(_typical(times) - self.step_s, 1e-9) for times in told]

    def _once(self, run: TimedRunner) -> list[float]:
        """Time a run roughly on each rank, less the overhead of any step."""
        told = self._told([run() for _ in range(2)])
        return [max(min(times) - self.step_s, 1e-6) for times in told]

    def _runner(self, make: Callable[[], LocalProgram]) -> TimedRunner:
        """Link a program and run it once; returns a runner that times so many runs of it.

        Args:
            make: makes it, anew for each group of ranks.
        """
        programs = ProgramSet({group: make() for group in self._groups})
        linked = link(programs, self._ranks, fed_in_parts=True)
        world = self._ranks.world
        sizes = [len(group) for group in self._groups] if world is None else [1]
        fed = [tf.constant(np.ones(size, np.float32)) for size in sizes]

        def run(calls: int = 1) -> float:
            with self._together():
                start = time.perf_counter()
                for _ in range(calls):
                    linked(fed, [])
                if self._on_gpu:
                    tf.test.experimental.sync_devices()
                return time.perf_counter() - start

        run()
        return run

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Begin a block on all ranks at once."""
        world = self._ranks.world
        if world is None:
            yield
            return
        with world.at("calibrating"):
            world.exchange.messages(None)
            yield

    def _agreed(self, seconds: list[float]) -> list[float]:
        """The largest of all ranks' figures, one by one."""
        return [max(times) for times in zip(*self._told(seconds), strict=True)]

    def _told(self, seconds: list[float]) -> list[list[float]]:
        """Return each rank's figures; ranks of one process have the same."""
        world = self._ranks.world
        if world is None:
            return [seconds] * len(self._ranks.devices)
        with world.at("comparing times"):
            return world.exchange.messages(seconds)


def _typical(times: Sequence[float]) -> float:
    """The median: what ranks lose by waiting for cores and for each other, steps lose as well."""
    return statistics.median(times)
