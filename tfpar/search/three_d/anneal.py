"""Simulated annealing over degrees, microbatch size and placement (auto3d, Algorithm 1)."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Sequence

from tfpar.search.three_d.evaluate import Evaluation, Found, lower_bound
from tfpar.search.three_d.model import Model
from tfpar.search.three_d.space import Degrees, Point, Space
from tfpar.search.three_d.strategy import Strategy

ITERATIONS = 500
"""As in the paper's experiments (§5)."""

DRAWS = 10
"""How often a neighbour is drawn, and then any point, until there is one that was not priced."""

SWEEP, RETURNS = 4, 10
"""A quarter of the iterations at most goes through the degrees; after a tenth without a better
strategy the search returns to the best."""

HOTTEST = 0.1
"""A step that is a tenth slower is first taken in one of e cases. The paper has 1 second, where
steps take one or two."""


def anneal(
    model: Model,
    *,
    seed: int = 0,
    iterations: int = ITERATIONS,
    seconds: float = math.inf,
    starts: Iterable[Strategy] = (),
) -> Found:
    """A good strategy where there are too many to price all of them.

    A part of the iterations goes through the degrees, those with the least bound first, on ranks in
    their order. From the best of these on neighbours are drawn; where they have led nowhere for a
    while, again from the best point that is known.

    Args:
        seconds: after which the search ends with what it has. The same seed finds the same as long
            as it does not end so.
        starts: strategies that are among those that are compared at the end; their degrees are gone
            through first.

    Raises:
        PlanError: there is no strategy; a MemoryLimitError if none was found that fits.
    """
    deadline = time.monotonic() + seconds
    rng = random.Random(seed)
    space = Space(model)
    evaluation = Evaluation(space)
    evaluation.add(starts)
    bounds = {degrees: lower_bound(model, degrees) for degrees in space.degrees}
    state, tried = _begin(space, bounds, evaluation, max(1, iterations // SWEEP), deadline)
    known, cost = state, evaluation.price(state)
    best, idle = cost, 0
    for step in range(tried, iterations):
        if time.monotonic() > deadline:
            break
        temperature = HOTTEST * (1 - step / iterations)
        # No placement of the others is better than what is known.
        hopeful = [degrees for degrees in space.degrees if bounds[degrees] <= best]
        near = (_neighbour(rng, space, state, hopeful) for _ in range(DRAWS))
        any_of = (space.sample(rng, rng.choice(hopeful)) for _ in range(DRAWS) if hopeful)
        drawn = itertools.chain(near, any_of)
        point = next((one for one in drawn if one not in evaluation.found), state)
        new = evaluation.price(point)
        idle = 0 if new < best else idle + 1
        if new < best:
            known, best = point, new
        if _accepts(rng, cost, new, temperature):
            state, cost = point, new
        elif idle > iterations // RETURNS:
            state, cost, idle = known, best, 0
    return evaluation.chosen()


def _begin(
    space: Space,
    bounds: dict[Degrees, float],
    evaluation: Evaluation,
    most: int,
    deadline: float,
) -> tuple[Point, int]:
    """The best point of some degrees on ranks in their order, and how many were priced."""
    given = [priced.strategy for priced in evaluation.ranked()]
    first = [Degrees(s.data, s.tensor, s.microbatch, s.virtual) for s in given]
    order = sorted(space.degrees, key=lambda d: (d not in first, bounds[d]))
    best, cost, tried = space.lying(order[0], space.plain_order), math.inf, 0
    for degrees in order:
        if tried == most or tried and (bounds[degrees] > cost or time.monotonic() > deadline):
            break
        point = space.lying(degrees, space.plain_order)
        new = evaluation.price(point)
        tried += 1
        if new < cost:
            best, cost = point, new
    return best, tried


def _accepts(rng: random.Random, cost: float, new: float, temperature: float) -> bool:
    """Always what is not worse, else with a probability that falls with the temperature.

    Differences are relative, as a step may take milliseconds or minutes.
    """
    if new <= cost:
        return True
    if math.isinf(new):
        return False
    return rng.random() < math.exp(-(new / cost - 1) / temperature)


def _neighbour(rng: random.Random, space: Space, state: Point, hopeful: Sequence[Degrees]) -> Point:
    """A point with other degrees, some of them the same, or with another placement, or both."""
    vary = rng.randrange(6)
    if vary > 2 and len(hopeful) != 1:
        own = state.degrees
        near = [
            degrees
            for degrees in hopeful
            if (vary != 3 or degrees.data == own.data)
            and (vary != 4 or degrees.tensor == own.tensor)
            and degrees != own
        ]
        degrees = rng.choice(near or hopeful or space.degrees)
        return space.sample(rng, degrees, _order(rng, state.order))
    standing = list(state.standing)
    if standing and rng.random() < 0.5:
        turned = rng.randrange(len(standing))
        standing[turned] = not standing[turned]
        return state._replace(standing=tuple(standing))
    return space.sample(rng, state.degrees, _order(rng, state.order))


def _order(rng: random.Random, order: tuple[int, ...]) -> tuple[int, ...]:
    """The same, one with two machines exchanged or one moved, or any."""
    vary = rng.randrange(4)
    if vary == 0 or len(set(order)) == 1:
        return order
    found = list(order)
    one, other = rng.sample(range(len(found)), 2)
    if vary == 1:
        found[one], found[other] = found[other], found[one]
    elif vary == 2:
        found.insert(other, found.pop(one))
    else:
        rng.shuffle(found)
    return tuple(found)
