"""Assignment of units to stages (Rhino §5): least traffic between stages of balanced time.

    assign(graph, num_stages) -> Assignment

No stage takes more than the average and a tolerance; where stages differ in pace, each takes its
own seconds (`slowdowns`). Where units are too large for that, none takes more than in the best cut
of the units in their order. With a `memory_budget`, only assignments that fit are considered. The
least traffic with the units in their given order is found at once (`chain_dp`). Where other orders
are possible, a small program looks for something better (`stage_ilp`); if it were large, that order
is used.

Balanced stages may have to be cut where much is sent. If a link then takes longer than any stage
computes (`links`), the balance is relaxed, and the assignment with the shortest step is used;
unless the tolerance is given.
Where a unit alone takes longer than a stage should, what follows it may then stay with it.
"""

from __future__ import annotations

import dataclasses
import math

from tfpar.planning.deadline import Deadline
from tfpar.planning.inter_op.stages.bounds import (
    SEVERAL,
    SLACK,
    Bounds,
    balanced_bounds,
    fixed_bounds,
)
from tfpar.planning.inter_op.stages.chain_dp import is_chain, minimize_chain_traffic
from tfpar.planning.inter_op.stages.links import StageLinks
from tfpar.planning.inter_op.stages.memory_budget import InfeasibleAssignment, MemoryBudget
from tfpar.planning.inter_op.stages.order_partition import Stages, partition_order, rebalance
from tfpar.planning.inter_op.stages.slowdowns import Paces, balanced_seconds, normalize_slowdowns
from tfpar.planning.inter_op.stages.stage_ilp import (
    SOLVER_SLACK,
    minimize_bottleneck,
    minimize_traffic,
)
from tfpar.planning.inter_op.stages.units import UnitGraph
from tfpar.spec.arguments import finite, integer

TOLERANCE = 0.1
"""By how much, relative to the average, a stage may take longer."""

LOOSER = (0.25, 0.5)
"""Tolerances of the balance, relative to the average, where a link limits the step. There are no
larger ones, however slow it is: the stages that are asked for are to share the work."""

SOLVED = 5000
"""Units times stages squared up to which an integer program looks for what sends less than stages
in the order of the units. A deep model is nearly a chain, for which that is within 0.5 %, while its
program may take minutes."""

RESCUED = 4000
"""Units times stages up to which an integer program looks for stages with room where no cut of the
units in their order has any. A deep model is nearly a chain, of which the cuts are all there is,
and its program takes long to find that nothing fits."""


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Units in stages.

    Attributes:
        stages: of each unit.
        sent_bytes: between stages, in a step.
        seconds: of each stage.
        most_seconds: that a stage was allowed.
        gap: how far, at most, `sent_bytes` are above the least, relative to them; infinite where
            that is not known: the time was over, or the program would have been too large.
    """

    stages: Stages
    sent_bytes: float
    seconds: tuple[float, ...]
    most_seconds: float
    gap: float = 0.0


def assign(
    graph: UnitGraph,
    num_stages: int,
    *,
    paces: Paces | None = None,
    rooms: MemoryBudget | None = None,
    links: StageLinks | None = None,
    tolerance: float | None = None,
    deadline: Deadline | None = None,
) -> Assignment:
    """Find the assignment that sends least, each stage with a unit at least; among those that the
    solver could have taken, one whose stages are better balanced.

    Args:
        paces: of stages (`slowdowns`); by default all 1.
        rooms: what the devices of stages can hold; None: everything.
        links: between the devices of stages; None: what is sent takes no time.
        tolerance: by how much, relative to the average, a stage may take longer; None: by
            `TOLERANCE`, or one of `LOOSER` where a link limits the step.
        deadline: what is found by then is used; it is cut short if something better may be left.

    Raises:
        ArgumentError: paces that are not one for each stage, or not above 0.
        PlanError: there are more stages than units, or what is fixed leaves no assignment; it is an
            InfeasibleAssignment if only `rooms` leave none, or none was found in time.
        SearchStopped: the search was given up meanwhile.
    """
    integer("num_stages", num_stages, 1)
    looser_ones = LOOSER if tolerance is None else ()
    tolerance = TOLERANCE if tolerance is None else finite("tolerance", tolerance)
    deadline, paces = deadline or Deadline(), normalize_slowdowns(paces, num_stages)
    bounds = fixed_bounds(graph, num_stages)
    if rooms is not None and min(rooms.limits) <= 0:
        raise InfeasibleAssignment("A stage has no room for any unit, whatever it is.")
    if rooms is not None and rooms.too_small(graph):
        raise InfeasibleAssignment(
            f"The devices of {num_stages} stages have no room for all units."
        )
    start = partition_order(graph, bounds, num_stages, paces, rooms)
    chain = is_chain(graph, rooms)
    if start is None and not chain and (rooms is None or len(graph.units) * num_stages <= RESCUED):
        start = minimize_bottleneck(graph, bounds, num_stages, deadline, paces, rooms)
    if start is None or (rooms is not None and not rooms.have_room(graph, start)):
        raise InfeasibleAssignment(
            f"The devices of {num_stages} stages have no room for the units of each."
        )
    average = balanced_seconds(graph.seconds, paces)
    slowest = max(graph.stage_seconds(start, paces))
    most_seconds = max(average * (1 + tolerance), slowest)
    gap = 0.0 if chain else math.inf
    deadline.check()
    narrowed: Bounds = balanced_bounds(graph, bounds, num_stages, most_seconds, paces) or bounds
    stages = minimize_chain_traffic(graph, bounds, most_seconds * (1 + SLACK), paces, rooms)
    if stages is None or (rooms is not None and not rooms.have_room(graph, stages)):
        stages = start
    if not chain and len(graph.units) * num_stages**2 <= SOLVED:
        stages, gap = minimize_traffic(
            graph, narrowed, num_stages, most_seconds, stages, deadline, paces, rooms
        )
    stages = rebalance(graph, narrowed, num_stages, stages, paces, rooms)
    most_seconds *= 1 + SOLVER_SLACK
    best = _assignment(graph, stages, paces, most_seconds, gap)
    if links is None:
        return best
    for looser in looser_ones:
        if not links.is_link_bound(graph, best.stages, paces):
            break
        most, least = average * (1 + looser), average * (1 - looser)
        if slowest > most:  # a unit alone takes longer, and leaves the others less than the average
            most = slowest * (1 + tolerance)
            least = min(least, *graph.stage_seconds(start, paces))
        found = minimize_chain_traffic(graph, bounds, most, paces, rooms, least)
        if found is not None and (rooms is None or rooms.have_room(graph, found)):
            other = _assignment(graph, found, paces, most, 0.0 if chain else math.inf)
            best = min(best, other, key=lambda a: links.step_seconds(graph, a.stages, paces))
    return best


def describe_excess(graph: UnitGraph, found: Assignment, paces: Paces, tolerance: float) -> str:
    """Say which stage takes longer than `tolerance` allows, and what in it takes longest; empty:
    none does."""
    average = balanced_seconds(graph.seconds, paces)
    slowest = max(found.seconds)
    if slowest <= average * (1 + tolerance) * (1 + SOLVER_SLACK):
        return ""
    stage = found.seconds.index(slowest)
    inside = [u for u, s in zip(graph.units, found.stages, strict=True) if s == stage]
    longest = max(inside, key=lambda unit: unit.seconds)
    loop = f", whose loop {longest.loop} cannot be cut" if longest.loop else ""
    advice = f" {SEVERAL}" if longest.loop else ""
    return (
        f"Of {len(found.seconds)} stages, stage {stage} computes {slowest / average:.2f} times the "
        f"average, more than tolerance={tolerance:g} allows: no cut is better. Most of it takes "
        f"{longest.name!r}{loop}.{advice}"
    )


def _assignment(
    graph: UnitGraph, stages: Stages, paces: Paces, most_seconds: float, gap: float
) -> Assignment:
    seconds = tuple(graph.stage_seconds(stages, paces))
    return Assignment(stages, graph.sent_bytes(stages), seconds, most_seconds, gap)
