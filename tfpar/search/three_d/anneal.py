"""Simulated annealing over degrees, microbatch size and placement (auto3d, Algorithm 1)."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Sequence

from tfpar.search.three_d.evaluate import Evaluation, Found, lower_bound
from tfpar.search.three_d.price import Model
from tfpar.search.three_d.space import Degrees, Point, Space
from tfpar.search.three_d.strategy import Strategy

ITERATIONS = 500
"""As in the paper's experiments (§5)."""

DRAWS = 10
"""How often a neighbour is drawn, until there is one that was not priced."""

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

    Args:
        seconds: after which the search ends with what it has. The same seed finds the same as long
            as it does not end so.
        starts: strategies that are among those that are compared at the end; the search begins with
            the degrees of the best.

    Raises:
        PlanError: there is no strategy; a MemoryLimitError if none was found that fits.
    """
    deadline = time.monotonic() + seconds
    rng = random.Random(seed)
    space = Space(model)
    evaluation = Evaluation(space)
    evaluation.add(starts)
    bounds = {degrees: lower_bound(model, degrees) for degrees in space.degrees}
    state = space.lying(_first(space, bounds, evaluation), space.plain_order)
    cost = best = evaluation.price(state)
    for step in range(iterations):
        if time.monotonic() > deadline:
            break
        temperature = HOTTEST * (1 - step / iterations)
        # No placement of the others is better than what is known.
        hopeful = [degrees for degrees in space.degrees if bounds[degrees] <= best]
        drawn = (_neighbour(rng, space, state, hopeful) for _ in range(DRAWS))
        point = next((one for one in drawn if one not in evaluation.found), state)
        new = evaluation.price(point)
        best = min(best, new)
        if _accepts(rng, cost, new, temperature):
            state, cost = point, new
    return evaluation.chosen()


def _first(space: Space, bounds: dict[Degrees, float], evaluation: Evaluation) -> Degrees:
    """The degrees of the best start, or those whose bound is the least."""
    for priced in evaluation.ranked():
        given = priced.strategy
        degrees = Degrees(given.data, given.tensor, given.microbatch)
        if degrees in bounds:
            return degrees
    return min(space.degrees, key=bounds.__getitem__)


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
    """A point with another tensor or data degree, any microbatch size and tiling; or with the same
    degrees and another placement."""
    data, tensor, _ = state.degrees
    vary = rng.randrange(4)
    near = [
        degrees
        for degrees in hopeful
        if (vary != 0 or degrees.data == data)
        and (vary != 1 or degrees.tensor == tensor)
        and (vary != 2 or degrees == state.degrees)
    ]
    degrees = rng.choice(near or hopeful or space.degrees)
    return space.sample(rng, degrees, _order(rng, state.order))


def _order(rng: random.Random, order: tuple[int, ...]) -> tuple[int, ...]:
    """The same, one with two machines exchanged, or any."""
    vary = rng.randrange(3)
    if vary == 0 or len(set(order)) == 1:
        return order
    found = list(order)
    if vary == 1:
        one, other = rng.sample(range(len(found)), 2)
        found[one], found[other] = found[other], found[one]
    else:
        rng.shuffle(found)
    return tuple(found)
