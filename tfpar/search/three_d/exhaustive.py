"""Every strategy of a space that its degrees' lower bound does not rule out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from tfpar.search.three_d.evaluate import Evaluation, Found, lower_bound
from tfpar.search.three_d.model import Model
from tfpar.search.three_d.space import Space
from tfpar.search.three_d.strategy import Strategy


def exhaustive(
    model: Model, *, seconds: float = math.inf, starts: Iterable[Strategy] = ()
) -> Found:
    """The best strategy of all by equations 1 to 4; of the best few, the fastest as simulated.

    Args:
        seconds: after which the search ends with what it has.
        starts: strategies that are among those that are compared at the end.

    Raises:
        PlanError: there is none; a MemoryLimitError if none fits.
    """
    deadline = time.monotonic() + seconds
    space = Space(model)
    evaluation = Evaluation(space)
    evaluation.add(starts)
    bounds = {degrees: lower_bound(model, degrees) for degrees in space.degrees}
    best, complete = math.inf, True
    for degrees in sorted(bounds, key=bounds.__getitem__):
        if bounds[degrees] > best:
            break
        for point in space.points(degrees):
            if time.monotonic() > deadline:
                complete = False
                break
            best = min(best, evaluation.price(point))
    return evaluation.chosen(complete)
