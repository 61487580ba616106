"""Bounds on the stage of each unit (Rhino §5.2).

Fixed units bound what they read and what reads them. So does balance: all that a unit depends on,
its ancestors, must fit into the stages up to its own, and all that depends on it, its descendants,
into those from its own on. §5.2 asks that of the average stage and a tolerance; here it is asked of
what a stage may take at most. So no assignment that keeps to that is lost.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import numpy as np

from tfpar.planning.inter_op.stages.slowdowns import (
    Paces,
    balanced_seconds,
    cumulative_throughput,
    normalize_slowdowns,
)
from tfpar.planning.inter_op.stages.units import UnitGraph
from tfpar.spec import PlanError


class TooManyStages(PlanError):
    """There are more stages than can be given something to do."""


Bounds = Sequence[tuple[int, int]]
"""Of each unit, the first and the last stage in which it can be."""

_MOST_NAMES = 8
"""Of units in a message."""

SEVERAL = (
    "Loops in several layers, or rounds written out (unroll=True of a Keras RNN), can be in "
    "several."
)
"""Advice where a loop is longer than a stage."""

SLACK = 1e-9
"""By how much, relatively, sums of seconds may differ and count as equal."""


def fixed_bounds(graph: UnitGraph, num_stages: int) -> Bounds:
    """Bound the stages of units by those of the units that are fixed.

    Raises:
        TooManyStages, PlanError: no assignment gives every stage a unit; says why.
    """
    count = len(graph.units)
    if num_stages > count:
        parts = "1 part" if count == 1 else f"{count} parts"
        names = [repr(unit.name) for unit in graph.units]
        listed = names if count <= _MOST_NAMES else [*names[:_MOST_NAMES], "..."]
        raise TooManyStages(
            f"{num_stages} stages are too many: the model has {parts} that can be assigned "
            f"to stages, so {count} is the most there can be ({', '.join(listed)}). Each stage of "
            f"a step that trains needs one: ask for fewer stages.{_loops_text(graph, num_stages)}"
        )
    first, last = [0] * count, [num_stages - 1] * count
    because: list[list[int | None]] = [[None] * count, [None] * count]
    for i, unit in enumerate(graph.units):
        if unit.stage is None:
            continue
        if unit.stage >= num_stages:
            raise PlanError(
                f"{unit.name!r} is to be in stage {unit.stage}, but there are {num_stages} stages, "
                f"numbered from 0."
            )
        first[i] = last[i] = unit.stage
        because[0][i] = because[1][i] = i
    for i, j in sorted(graph.edges):
        if first[i] > first[j]:
            first[j], because[0][j] = first[i], because[0][i]
    for i, j in sorted(graph.edges, reverse=True):
        if last[j] < last[i]:
            last[i], because[1][i] = last[j], because[1][j]
    for i in range(count):
        early, late = because[0][i], because[1][i]
        if first[i] > last[i] and early is not None and late is not None:
            one, other = graph.units[early], graph.units[late]
            raise PlanError(
                f"{one.name!r} is to be in stage {one.stage} and {other.name!r} in stage "
                f"{other.stage}, but {other.name!r} reads what comes of {one.name!r}: it cannot be "
                f"in an earlier stage. Change one of the two."
            )
    bounds = [*zip(first, last, strict=True)]
    _check_none_is_empty(graph, bounds, num_stages)
    return bounds


def _loops_text(graph: UnitGraph, num_stages: int) -> str:
    """Say which loops take longer than a stage would if all took equally long; empty: none do."""
    average = graph.seconds / num_stages
    found = [unit for unit in graph.units if unit.loop and unit.seconds > average]
    said = [
        f"{unit.loop} (its part takes {unit.seconds / graph.seconds:.0%} of the step)"
        for unit in found
    ]
    if not said:
        return ""
    one = len(said) == 1
    return (
        f" The loop{'' if one else 's'} {', '.join(said)} cannot be cut: each round reads what the "
        f"one before it has made, so that {'it is' if one else 'each is'} in one stage. {SEVERAL}"
    )


def seed_each_stage(bounds: Bounds, num_stages: int) -> dict[int, int]:
    """Choose a unit for each stage, as far as there is one.

    A stage takes, of the units that can be there, the one that has to be placed first: that
    leaves the fewest stages empty.
    """
    starts = sorted(range(len(bounds)), key=lambda i: bounds[i][0], reverse=True)
    waiting: list[tuple[int, int]] = []
    found = {}
    for stage in range(num_stages):
        while starts and bounds[starts[-1]][0] <= stage:
            unit = starts.pop()
            heapq.heappush(waiting, (bounds[unit][1], unit))
        while waiting and waiting[0][0] < stage:
            heapq.heappop(waiting)
        if waiting:
            found[stage] = heapq.heappop(waiting)[1]
    return found


def _check_none_is_empty(graph: UnitGraph, bounds: Bounds, num_stages: int) -> None:
    found = seed_each_stage(bounds, num_stages)
    empty = [stage for stage in range(num_stages) if stage not in found]
    if empty:
        fixed = ", ".join(f"{u.name!r} in {u.stage}" for u in graph.units if u.stage is not None)
        raise TooManyStages(
            f"Nothing is left for stage {empty[0]} of {num_stages}, as units are fixed: {fixed}. "
            f"Ask for {len(found)} stages or fewer, or fix fewer units."
        )


def balanced_bounds(
    graph: UnitGraph,
    bounds: Bounds,
    num_stages: int,
    most_seconds: float,
    paces: Paces | None = None,
) -> Bounds | None:
    """Narrow `bounds` to where no stage takes more than `most_seconds`; None: there is none."""
    paces = normalize_slowdowns(paces, num_stages)
    if balanced_seconds(graph.seconds, paces) > most_seconds * (1 + SLACK):
        return None
    up_to, from_end = cumulative_throughput(paces), cumulative_throughput(paces[::-1])
    seconds, ancestors = np.array([unit.seconds for unit in graph.units]), _ancestors(graph)
    before, after = seconds @ ancestors, ancestors @ seconds
    found = []
    for i, (first, last) in enumerate(bounds):
        first = max(first, _stages_filled(before[i], most_seconds, up_to) - 1)
        last = min(last, num_stages - _stages_filled(after[i], most_seconds, from_end))
        if first > last:
            return None
        found.append((first, last))
    return found


def _stages_filled(seconds: float, most_seconds: float, together: Sequence[float]) -> int:
    """Count the stages that so many seconds of work fill, one at least, if none takes more than
    `most_seconds`.

    Args:
        together: what one stage, two, ... do together in the time that one of pace 1 does 1.
    """
    if seconds <= 0 or most_seconds <= 0:
        return 1
    return 1 + bisect.bisect_left(together, seconds / most_seconds * (1 - SLACK))


def _ancestors(graph: UnitGraph) -> np.ndarray:
    """[i, j]: whether j is i or depends on it."""
    found = np.eye(len(graph.units), dtype=bool)
    for i, j in sorted(graph.edges):
        found[:, j] |= found[:, i]
    return found
