"""Every strategy of a space that its degrees' lower bound does not rule out."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable

from tfpar.planning.inter_op.three_d.evaluation import Evaluation, StrategySearchResult, lower_bound
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.space import StrategyPoint, StrategySpace
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.planning.problem import Progress


def exhaustive(
    model: StrategyProblem,
    *,
    seconds: float = math.inf,
    starts: Iterable[Strategy3D] = (),
    progress: Progress | None = None,
) -> StrategySearchResult:
    """Find the best strategy of all as simulated.

    Args:
        seconds: after which the search ends with what it has.
        starts: strategies that are among those that are compared at the end.
        progress: is called with each point that is priced.

    Raises:
        PlanError: there is none; a MemoryLimitError if none fits.
    """
    deadline = time.monotonic() + seconds

    def over() -> bool:
        return time.monotonic() > deadline

    space = StrategySpace(model)
    evaluation = Evaluation(space, progress)
    evaluation.add(starts)
    bounds = {degrees: lower_bound(model, degrees) for degrees in space.degrees}
    complete = True
    for degrees in sorted(bounds, key=bounds.__getitem__):
        if bounds[degrees] >= evaluation.best_s:
            break
        best: tuple[float, StrategyPoint] | None = None
        for point in space.points(degrees):
            if over():
                complete = False
                break
            bound = evaluation.price(point)
            if best is None or bound < best[0]:
                best = bound, point
        if best is not None and best[0] < evaluation.best_s:
            evaluation.simulate(best[1])
    found = evaluation.chosen(math.inf, over)
    return dataclasses.replace(found, complete=found.complete and complete)
