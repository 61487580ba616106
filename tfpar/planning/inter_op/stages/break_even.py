"""Break-even speed of links: the factor by which they would have to be faster or slower for another
plan to be taken."""

from __future__ import annotations

import math
from collections.abc import Callable

from tfpar.planning.deadline import Deadline

MOST = 1024.0
"""The largest factor that is looked at: no one has such links instead."""

NEAR = 1.1
"""Precision of the factor that is found: its largest ratio to the least one."""

Wins = Callable[[float], bool]
"""Whether a rival is taken if links are so many times as fast."""


def find_break_even_factor(wins: Wins, faster_first: bool, deadline: Deadline) -> float | None:
    """Find the factor nearest to 1 by which links would have to be as fast for a rival to be taken.

    At the factor that is returned it is; at one nearer to 1 by `NEAR`, and at the powers of two
    between, it is not.

    Args:
        wins: false at 1.
        faster_first: whether to look at faster links before slower ones.
        deadline: after which nothing is found any more.

    Returns:
        None if neither faster nor slower links are enough.
    """
    for sign in (1, -1) if faster_first else (-1, 1):
        if deadline.over():
            return None
        if wins(MOST**sign):
            return _nearest(wins, sign, deadline)
    return None


def _nearest(wins: Wins, sign: int, deadline: Deadline) -> float | None:
    below, above = 1.0, 2.0
    while above < MOST and not wins(above**sign):
        below, above = above, 2 * above
        if deadline.over():
            return None
    while above / below > NEAR:
        if deadline.over():
            return None
        middle = math.sqrt(below * above)
        if wins(middle**sign):
            above = middle
        else:
            below = middle
    return above**sign
