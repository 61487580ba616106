"""Assignments without a solver: units in an order, cut into stages that take alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tfpar.search.stages.bounds import SLACK, Bounds
from tfpar.search.stages.paces import Paces, read_paces
from tfpar.search.stages.rooms import Rooms
from tfpar.search.stages.units import UnitGraph

Stages = tuple[int, ...]
"""The stage of each unit."""


def best_cut(
    graph: UnitGraph,
    bounds: Bounds,
    num_stages: int,
    paces: Paces | None = None,
    rooms: Rooms | None = None,
) -> Stages | None:
    """The assignment whose slowest stage takes least, of those that cut an order of the units; None
    where, with what is fixed and what there is room for, no order that is tried can be cut.

    Orders that are tried: as the units are, and, which matters where some are fixed, by the first
    and by the last stage in which they can be. Bounds never fall along an edge: each is
    topological.
    """
    count, paces = len(graph.units), read_paces(paces, num_stages)
    orders = (
        range(count),
        sorted(range(count), key=lambda i: bounds[i]),
        sorted(range(count), key=lambda i: bounds[i][::-1]),
    )
    found = [_cut(graph, order, bounds, paces, rooms) for order in orders]
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
    rooms: Rooms | None,
) -> Stages | None:
    """The best cut of `order`, by dynamic programming over (units placed, stages used); each stage
    by itself has room for its units."""
    count = len(order)
    total = [0.0, *itertools.accumulate(graph.units[i].seconds for i in order)]
    least = [math.inf] * (count + 1)
    least[0] = 0.0
    begins = []
    for stage, pace in enumerate(paces):
        row, begin = [math.inf] * (count + 1), [0] * (count + 1)
        held = [0.0] * (count + 1)
        if rooms is not None:
            sizes = (rooms.of_unit(graph.units[i], stage) for i in order)
            held = [0.0, *itertools.accumulate(sizes)]
        room = math.inf if rooms is None else rooms.limit(stage)
        for end in range(stage + 1, count + 1):
            for start in reversed(range(end)):
                first, last = bounds[order[start]]
                if not first <= stage <= last or held[end] - held[start] > room:
                    break
                own = (total[end] - total[start]) * pace
                slowest = max(least[start], own)
                if slowest < row[end]:
                    row[end], begin[end] = slowest, start
                if own >= row[end]:
                    break
        least = row
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


def levelled(
    graph: UnitGraph,
    bounds: Bounds,
    num_stages: int,
    stages: Sequence[int],
    paces: Paces | None = None,
    rooms: Rooms | None = None,
) -> Stages:
    """`stages` with single units moved to where there is room, as long as the slowest stages get
    faster (the two stages of each move: the slower of them) and no more is sent."""
    found, paces = list(stages), read_paces(paces, num_stages)
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
