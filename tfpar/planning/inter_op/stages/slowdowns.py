"""Slowdown of stages whose devices differ.

The *pace* of a stage is its slowdown: the seconds that it takes for a second's work of the device
that units' seconds are of, 2 if it is half as fast. All that compares stages compares their seconds
at their own paces. The average is what each would take if work could be divided at will: all of it,
divided by the sum of 1 / pace.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tfpar.spec.arguments import argument_error, finite

Paces = Sequence[float]
"""Of each stage, above 0."""


def normalize_slowdowns(paces: Paces | None, num_stages: int) -> Paces:
    """Return the pace of each stage; by default all are 1.

    Raises:
        ArgumentError: not one for each stage, or one that is not above 0, or has no end.
    """
    if paces is None:
        return (1.0,) * num_stages
    if len(paces) != num_stages:
        raise argument_error("paces", paces, f"{num_stages} numbers, one for each stage")
    return tuple(finite("paces", pace, above=0) for pace in paces)


def cumulative_throughput(paces: Paces) -> list[float]:
    """Return for each stage the work that it and the stages before it do together in the time that
    a stage of pace 1 does 1."""
    return [*itertools.accumulate(1.0 / pace for pace in paces)]


def balanced_seconds(seconds: float, paces: Paces) -> float:
    """Return the seconds of each stage if all took equally long.

    Args:
        seconds: of all work, on a stage of pace 1.
    """
    return seconds / cumulative_throughput(paces)[-1]
