"""How long programs take, agreed upon by all ranks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfpar.rewrite.local_graph import LocalProgram
from tfpar.rewrite.programs import ProgramSet
from tfpar.runtime.executable import link
from tfpar.runtime.ranks import Ranks

Chain = Callable[[int], LocalProgram]
"""Makes a chain of so many links."""

# What a chain should take: as long as the ops of a step do without a break, for on a busy machine
# short bursts are let through. At least long enough to be told from the noise of a call.
_LINKS_S, _LEAST_LINKS_S = 15e-3, 3e-3
_LONGEST = 64  # links: compiling them takes time, too
_CALL_S = 0.1  # what a call costs does not matter beside a link of this length
_FEWEST, _MOST = 3, 15  # runs


class Timer:
    """Times programs on all ranks at once; whatever it tells, it tells on every rank.

    Args:
        ranks: that run the programs.
        budget_s: what all of it may take, in seconds.

    Attributes:
        step_s: seconds that a program takes which holds nothing.
    """

    def __init__(self, ranks: Ranks, budget_s: float) -> None:
        self._ranks = ranks
        self._end = time.monotonic() + budget_s
        self._on_gpu = "GPU" in ranks.devices[0]
        self.step_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left; of the rank that has the least."""
        return -self._agreed([time.monotonic() - self._end])[0]

    def measure_step(self, empty: LocalProgram) -> None:
        """Time a program that holds nothing."""
        run = self._runner(empty)
        self.step_s = _typical(self._agreed([run() for _ in range(_MOST)]))

    def seconds(self, chain: Chain, allowed_s: float) -> float:
        """Seconds that a chain takes for each of its links.

        The difference of two chains, one twice as long, knows nothing of what a call costs.

        Args:
            allowed_s: about how long it may take.
        """
        start = time.monotonic()
        once = self._once(chain(1))
        if once > max(_CALL_S, 100 * self.step_s):
            return once
        links_s = max(_LEAST_LINKS_S, min(_LINKS_S, allowed_s / (4 * _FEWEST)))
        length = max(1, min(_LONGEST, math.ceil(links_s / once)))
        short, long = (self._runner(chain(n)) for n in (length, 2 * length))
        (spent,) = self._agreed([time.monotonic() - start])
        runs = int((allowed_s - spent) / (3 * length * once + 4 * self.step_s))
        times = [(short(), long()) for _ in range(max(_FEWEST, min(_MOST, runs)))]
        flat = self._agreed([t for pair in times for t in pair])
        longer, shorter = _typical(flat[1::2]), _typical(flat[::2])
        # Noise may have made the shorter one last longer: then what is known is a bound.
        whole = max(longer - self.step_s, 1e-9)
        return (longer - shorter) / length if longer > shorter else whole / (2 * length)

    def whole(self, program: LocalProgram, allowed_s: float) -> float:
        """Seconds of a program beyond what any costs."""
        run = self._runner(program)
        (first,) = self._agreed([run()])
        runs = max(_FEWEST, min(_MOST, int(allowed_s / first)))
        times = self._agreed([run() for _ in range(runs)])
        return max(_typical(times) - self.step_s, 1e-9)

    def _once(self, program: LocalProgram) -> float:
        run = self._runner(program)
        times = self._agreed([run() for _ in range(2)])
        return max(min(times) - self.step_s, 1e-6)

    def _runner(self, program: LocalProgram) -> Callable[[], float]:
        """Runs a program, which has been run once already, and gives the seconds."""
        linked = link(ProgramSet.of(program), self._ranks, fed_in_parts=True)
        world = self._ranks.world
        size = program.mesh.size if world is None else 1
        fed = [tf.constant(np.ones(size, np.float32))]

        def run() -> float:
            with self._together():
                start = time.perf_counter()
                linked(fed, [])
                if self._on_gpu:
                    tf.test.experimental.sync_devices()
                return time.perf_counter() - start

        run()
        return run

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """All ranks begin now."""
        world = self._ranks.world
        if world is None:
            yield
            return
        with world.at("calibrating"):
            world.exchange.messages(None)
            yield

    def _agreed(self, seconds: list[float]) -> list[float]:
        """The largest of all ranks' figures, one by one."""
        world = self._ranks.world
        if world is None:
            return seconds
        with world.at("comparing times"):
            told = world.exchange.messages(seconds)
        return [max(times) for times in zip(*told, strict=True)]


def _typical(times: Sequence[float]) -> float:
    """The lower quartile: whatever else the machine does makes times longer, never shorter."""
    return float(np.quantile(times, 0.25))
