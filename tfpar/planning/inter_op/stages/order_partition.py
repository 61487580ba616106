"""Assignments without a solver: units in an order, cut into balanced stages."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from tfpar.planning.inter_op.stages.bounds import SLACK, Bounds
from tfpar.planning.inter_op.stages.memory_budget import MemoryBudget
from tfpar.planning.inter_op.stages.slowdowns import Paces, normalize_slowdowns
from tfpar.planning.inter_op.stages.units import UnitGraph

Stages = tuple[int, ...]
"""The stage of each unit."""


def partition_order(
    graph: UnitGraph,
    bounds: Bounds,
    num_stages: int,
    paces: Paces | None = None,
    rooms: MemoryBudget | None = None,
) -> Stages | None:
    """Find the assignment whose slowest stage takes least, of those that cut an order of the units;
    None where, with what is fixed and the memory budget, no order that is tried can be cut.

    Orders that are tried: as the units are, and, which matters where some are fixed, by the first
    and by the last stage in which they can be. Bounds never fall along an edge: each is
    topological.
    """
    count, paces = len(graph.units), normalize_slowdowns(paces, num_stages)
    orders = (
        range(count),
        sorted(range(count), key=lambda i: bounds[i]),
        sorted(range(count), key=lambda i: bounds[i][::-1]),
    )
    found = [_cut(graph, o, bounds, paces, rooms) for o in dict.fromkeys(map(tuple, orders))]
    cuts = [
        stages
        for stages in found
        if stages is not None and (rooms is None or rooms.have_room(graph, stages))
    ]
    return min(cuts, key=lambda s: max(graph.stage_seconds(s, paces)), default=None)


def _cut(
    graph: UnitGraph,
    order: Sequence[int],
    bounds: Bounds,
    paces: Paces,
    rooms: MemoryBudget | None,
) -> Stages | None:
    """The best cut of `order`, by dynamic programming over (units placed, stages used); each stage
    by itself has room for its units."""
    count = len(order)
    total = [0.0, *itertools.accumulate(graph.units[i].seconds for i in order)]
    least = [0.0] + [math.inf] * count
    begins = []
    for stage, pace in enumerate(paces):
        held, room = [0.0] * (count + 1), math.inf
        if rooms is not None:
            sizes = (rooms.of_unit(graph.units[i], stage) for i in order)
            held, room = [0.0, *itertools.accumulate(sizes)], rooms.limit(stage)
        able = [bounds[i][0] <= stage <= bounds[i][1] for i in order]
        earliest = _earliest(able, held, room)
        least, begin = _with_stage(least, [seconds * pace for seconds in total], earliest)
        begins.append(begin)
    if math.isinf(least[count]):
        return None
    stages, end = [0] * count, count
    for stage in reversed(range(len(paces))):
        start = begins[stage][end]
        for i in order[start:end]:
            stages[i] = stage
        end = start
    return tuple(stages)


def _earliest(able: Sequence[bool], held: Sequence[float], room: float) -> list[int]:
    """Of each end, where the longest run of units begins that a stage can have; the end itself if
    it can have none.

    Args:
        able: whether the stage can have each unit.
        held: bytes of the units before each place.
        room: bytes that the stage has room for.
    """
    found, start = [0], 0
    for end in range(1, len(able) + 1):
        start = start if able[end - 1] else end
        while start < end and held[end] - held[start] > room:
            start += 1
        found.append(start)
    return found


def _with_stage(
    least: Sequence[float], total: Sequence[float], earliest: Sequence[int]
) -> tuple[list[float], list[int]]:
    """(seconds of the slowest stage, where the last stage begins) of each number of units placed,
    with one stage more.

    Only those beginnings are kept of which later ones take the stages before longer. The last
    stage takes less time the later it begins: the best is where the two meet.

    Args:
        least: seconds of the slowest stage without the last one.
        total: of the units before each place, in the last one.
        earliest: of each end, where the last stage can begin (`_earliest`).
    """
    row, begin = [math.inf] * len(least), [0] * len(least)
    starts: list[int] = []
    passed = 0  # of `starts`, so many come too early
    for end in range(1, len(least)):
        before = least[end - 1]
        if before < math.inf:
            while len(starts) > passed and least[starts[-1]] >= before:
                starts.pop()
            starts.append(end - 1)
        passed = bisect.bisect_left(starts, earliest[end], passed)
        if passed == len(starts):
            continue

        def meets(start: int, end: int = end) -> bool:
            return least[start] >= total[end] - total[start]

        at = bisect.bisect_left(starts, True, passed, key=meets)
        near = starts[max(at - 1, passed) : at + 1]
        row[end], start = min((max(least[s], total[end] - total[s]), -s) for s in near)
        begin[end] = -start
    return row, begin


def rebalance(
    graph: UnitGraph,
    bounds: Bounds,
    num_stages: int,
    stages: Sequence[int],
    paces: Paces | None = None,
    rooms: MemoryBudget | None = None,
) -> Stages:
    """Move single units of `stages` to where there is room, as long as the slowest stages get
    faster (the two stages of each move: the slower of them) and no more is sent."""
    found, paces = list(stages), normalize_slowdowns(paces, num_stages)
    seconds = graph.stage_seconds(found, paces)
    sent = graph.sent_bytes(found)
    numbers = [found.count(stage) for stage in range(num_stages)]
    before: list[list[int]] = [[] for _ in graph.units]
    after: list[list[int]] = [[] for _ in graph.units]
    for i, j in graph.edges:
        before[j].append(i)
        after[i].append(j)
    moved = True
    while moved:
        moved = False
        for i, unit in enumerate(graph.units):
            own = found[i]
            first = max([bounds[i][0], *(found[j] for j in before[i])])
            last = min([bounds[i][1], *(found[j] for j in after[i])])
            for stage in (own - 1, own + 1):
                if not first <= stage <= last or numbers[own] == 1:
                    continue
                longer = seconds[stage] + unit.seconds * paces[stage]
                if longer >= seconds[own] * (1 - SLACK):
                    continue
                found[i] = stage
                now = graph.sent_bytes(found)
                fits = rooms is None or rooms.have_room(graph, found)
                if now > sent * (1 + SLACK) or not fits:
                    found[i] = own
                    continue
                sent = now
                seconds[own] -= unit.seconds * paces[own]
                seconds[stage] = longer
                numbers[own] -= 1
                numbers[stage] += 1
                moved = True
                break
    return tuple(found)
