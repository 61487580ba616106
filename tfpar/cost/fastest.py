"""The schedule that is fastest for the stages of a step: of those by name, and of lists."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from tfpar.cost.staged_prices import StagedPrices
from tfpar.pipeline.generators import FAMILIES, generate
from tfpar.pipeline.generators.listed import RULES, Work, list_schedule
from tfpar.pipeline.schedule import Schedule
from tfpar.spec import ArgumentError, ScheduleError

_MANY = 4000
"""Of so many tasks, lists are made by one rule alone: that takes a second."""


def fastest_schedule(
    prices: StagedPrices,
    actors: Sequence[int],
    microbatches: int,
    memory_limit: float = math.inf,
) -> Schedule:
    """The schedule with which a step is simulated to be fastest, of those that fit into memory.

    Candidates are the schedules by name for these actors, and lists (`generators.listed`) made from
    what stages take and keep. So it is never slower than the fastest by name that fits. If none
    fits, it is the one that lacks least.

    Args:
        prices: of the stages.
        actors: that run each stage.
        memory_limit: bytes that a rank may hold.

    Raises:
        ScheduleError: none by name is for these actors.
    """
    best: Schedule | None = None
    least = (math.inf, math.inf, math.inf)
    candidates = [*_by_name(actors, microbatches)]
    if not candidates:
        raise ScheduleError(f"There is no schedule by name for stages on actors {list(actors)}.")
    if not prices.graph.joins:
        candidates += _lists(prices, actors, microbatches, memory_limit)
    for schedule in candidates:
        found = prices.run(schedule)
        held = max(peak.num_bytes for peak in found.peaks)
        key = max(0.0, held - memory_limit), found.seconds, held
        if key < least:
            best, least = schedule, key
    assert best is not None
    return best


def _by_name(actors: Sequence[int], microbatches: int) -> Iterator[Schedule]:
    num_actors = max(actors) + 1
    for name in ("1f1b", *FAMILIES):
        try:
            schedule = generate(name, num_actors, microbatches, len(actors) // num_actors)
        except ArgumentError:  # not for so many stages
            continue
        if schedule.actors == tuple(actors):
            yield schedule


def _lists(
    prices: StagedPrices, actors: Sequence[int], microbatches: int, memory_limit: float
) -> Iterator[Schedule]:
    costs = [stage.cost for stage in prices.stages]
    work = [Work(c.seconds, c.kept_bytes, c.kept_for_weights_bytes) for c in costs]
    own = [
        [c for c, home in zip(costs, actors, strict=True) if home == a]
        for a in range(max(actors) + 1)
    ]
    room = [
        memory_limit
        - sum(c.fixed_bytes for c in stages)
        - max(max(c.working_bytes.values(), default=0.0) for c in stages)
        for stages in own
    ]
    few = [len(own) * sum(c.kept_bytes for c in stages) for stages in own]
    delays = _delays(prices)
    rules = RULES if 3 * len(actors) * microbatches < _MANY else RULES[:1]
    for most in (room, [*map(min, few, room)]):
        for halves in (False, True):
            for rule in rules:
                try:
                    yield list_schedule(
                        actors,
                        microbatches,
                        work,
                        halves=halves,
                        stages=prices.graph,
                        delays=delays,
                        most=most,
                        rule=rule,
                    )
                except ScheduleError:  # not one microbatch fits
                    break


def _delays(prices: StagedPrices) -> Mapping[tuple[int, int], float]:
    """What a microbatch takes from stage to stage, with nothing else on its way."""
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
