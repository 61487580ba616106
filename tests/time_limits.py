"""Time limits of tests, in seconds of the reference machine, scaled by how slow this one is."""

from __future__ import annotations

import functools
import os

from benchmarks.machine import python_factor

VARIABLE = "TFPAR_TESTS_MACHINE"
"""The environment variable by which processes that share the tests get the factor."""


def time_limit(seconds: float) -> float:
    """Seconds of this machine that are as much as `seconds` of the reference machine."""
    return seconds * machine_factor()


@functools.cache
def machine_factor() -> float:
    """How much slower this machine is than the reference machine, and 1 where it is faster."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{max(1.0, python_factor()):.2f}"
    return float(os.environ[VARIABLE])
