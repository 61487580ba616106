"""Search for the fastest schedule of a pipeline's stages, by simulated steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfpar.cost.pipeline_cost import LIST, ScheduleCost
from tfpar.cost.pipeline_cost_model import PipelineCostModel
from tfpar.pipeline.generators import schedules_on
from tfpar.pipeline.generators.list_scheduling import RULES, StageDurations, TooLate, list_schedule
from tfpar.pipeline.schedule import Schedule
from tfpar.spec import ScheduleError

_MANY = 4000
"""Of so many tasks, lists are made by one rule alone: that takes a second. And no schedule by name
is simulated that cannot fit, if another may."""


class ScheduleCandidate(NamedTuple):
    """Schedule with the simulated cost of a step in it."""

    schedule: Schedule
    price: ScheduleCost


def compare_schedules(
    prices: PipelineCostModel,
    actors: Sequence[int],
    microbatches: int,
    halves: bool = True,
) -> tuple[ScheduleCandidate, ...]:
    """Rank the schedules that a step could run in: the fastest first of those that fit into memory.

    They are the schedules by name for these actors, and the best of the lists
    (`generators.list_scheduling`) that are made from what stages take and keep, as far as these may
    be the fastest; one is made in any case. So the first is never slower than the fastest by name
    that fits. What does not fit comes last, in the order of what it lacks; of many tasks it is left
    out, if it cannot fit whenever they run.

    Args:
        prices: of the stages.
        actors: that run each stage.
        halves: whether backward passes may run in halves.

    Raises:
        ScheduleError: none by name is for these actors.
    """

    def priced(name: str, schedule: Schedule) -> ScheduleCandidate:
        found = prices.run(schedule)
        held = max(peak.num_bytes for peak in found.peaks)
        excess = prices.excess_bytes(found)
        return ScheduleCandidate(
            schedule, ScheduleCost(name, found.seconds + prices.step_s, held, excess)
        )

    def rank(candidate: ScheduleCandidate) -> tuple[float, float, float]:
        price = candidate.price
        return price.excess_bytes, price.seconds, price.memory_bytes

    by_name = [*schedules_on(actors, microbatches, halves)]
    if not by_name:
        raise ScheduleError(f"There is no schedule by name for stages on actors {list(actors)}.")
    if _are_many(actors, microbatches):
        by_name = [one for one in by_name if _may_fit(prices, one[1])] or by_name
    named = [priced(*one) for one in by_name]
    lists: list[ScheduleCandidate] = []
    if not prices.graph.joins:
        lists = sorted(_lists(prices, actors, microbatches, halves, named, priced), key=rank)[:1]
    return tuple(sorted([*named, *lists], key=rank))


def _lists(
    prices: PipelineCostModel,
    actors: Sequence[int],
    microbatches: int,
    may_halve: bool,
    named: Sequence[ScheduleCandidate],
    priced: Callable[[str, Schedule], ScheduleCandidate],
) -> Iterator[ScheduleCandidate]:
    """A list, and those that may be faster than it and all others that fit. Tasks start no earlier
    in a simulation than when they are listed: lists that end later are not made to the end."""
    costs = [stage.cost for stage in prices.stages]
    work = [StageDurations(c.seconds, c.kept_bytes, c.kept_for_weights_bytes) for c in costs]
    own = [
        [c for c, home in zip(costs, actors, strict=True) if home == a]
        for a in range(max(actors) + 1)
    ]
    room = [
        limit
        - sum(c.fixed_bytes for c in stages)
        - max(max(c.working_bytes.values(), default=0.0) for c in stages)
        for stages, limit in zip(own, prices.limits, strict=True)
    ]
    few = [len(own) * sum(c.kept_bytes for c in stages) for stages in own]
    updates = [sum(c.seconds.get("U", 0.0) for c in stages) for stages in own]
    delays = _delays(prices)
    rules = RULES[:1] if _are_many(actors, microbatches) else RULES
    fastest = min((_seconds(candidate) for candidate in named), default=math.inf)
    made: set[Schedule] = set()
    each = [min(c.kept_bytes for c in stages) for stages in own]
    limits = [room]
    if any(r - f >= e for r, f, e in zip(room, few, each, strict=True)):
        limits.append([*map(min, few, room)])  # else there is room for no microbatch more than that
    for most in limits:
        for halves in (False, True)[: 1 + may_halve]:
            for rule in rules:
                latest = [fastest - prices.step_s - seconds for seconds in updates]
                try:
                    found = list_schedule(
                        actors,
                        microbatches,
                        work,
                        halves=halves,
                        stages=prices.graph,
                        delays=delays,
                        most=most,
                        rule=rule,
                        latest=latest if made else None,
                    )
                except TooLate:
                    continue
                except ScheduleError:  # not one microbatch fits
                    break
                if found not in made:
                    made.add(found)
                    candidate = priced(LIST, found)
                    fastest = min(fastest, _seconds(candidate))
                    yield candidate


def fits_at_all(prices: PipelineCostModel, actors: Sequence[int]) -> bool:
    """Whether each actor has room for what it holds all the time and for one microbatch of any of
    its stages: else no schedule fits."""
    for actor, limit in enumerate(prices.limits):
        own = [
            stage.cost for stage, home in zip(prices.stages, actors, strict=True) if home == actor
        ]
        most = max(c.kept_bytes + c.working_bytes.get("F", 0.0) for c in own)
        if sum(c.fixed_bytes for c in own) + most > limit:
            return False
    return True


def _are_many(actors: Sequence[int], microbatches: int) -> bool:
    return 3 * len(actors) * microbatches >= _MANY


def _may_fit(prices: PipelineCostModel, schedule: Schedule) -> bool:
    """Whether what tasks keep and need beside fits, whenever they run; what is sent comes on
    top."""
    for order, limit in zip(schedule.orders, prices.limits, strict=True):
        held = sum(prices.stages[s].cost.fixed_bytes for s in {task.stage for task in order})
        for task in order:
            cost = prices.stages[task.stage].cost
            held += cost.kept_bytes * (task.kind == "F")
            if held + cost.working_bytes.get(task.kind, 0.0) > limit:
                return False
            held -= cost.freed_bytes(task.kind)
    return True


def _seconds(candidate: ScheduleCandidate) -> float:
    """Of a step; infinite if it does not fit."""
    return math.inf if candidate.price.excess_bytes else candidate.price.seconds


def _delays(prices: PipelineCostModel) -> Mapping[tuple[int, int], float]:
    """Price the way of a microbatch from stage to stage, with nothing else on its way."""
    found = {}
    for link in prices.graph.links:
        there, back = (link.source, link.target), (link.target, link.source)
        for pair, size in ((there, link.forward_bytes), (back, link.backward_bytes or 0.0)):
            seconds = 0.0
            for route in prices.network.routes.get(pair, ()):
                slowest = min(
                    (prices.network.bandwidth[name] for name in route.links), default=math.inf
                )
                seconds = max(seconds, route.latency_s + size * route.part / slowest)
            found[pair] = seconds
    return found
