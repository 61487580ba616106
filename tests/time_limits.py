"""Time limits of tests, in seconds of the reference machine, and waiting within them."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

from benchmarks.machine import python_factor

VARIABLE = "TFPAR_TESTS_MACHINE"
"""The environment variable by which processes that share the tests get the factor."""


def time_limit(seconds: float) -> float:
    """Seconds of this machine that are as much as `seconds` of the reference machine."""
    return seconds * machine_factor()


def wait_until(holds: Callable[[], object], seconds: float) -> bool:
    """Whether it holds within so many seconds of the reference machine.

    For what tells nobody when it comes: a file, the end of a process that is not this one's child.
    """
    end = time.monotonic() + time_limit(seconds)
    while not holds():
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
    return True


@functools.cache
def machine_factor() -> float:
    """How much slower this machine is than the reference machine, and 1 where it is faster."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{max(1.0, python_factor()):.2f}"
    return float(os.environ[VARIABLE])
