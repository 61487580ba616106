"""The search: every strategy where there are few, else annealing from Megatron's heuristic."""

from __future__ import annotations

import math

from tfpar.planning.inter_op.three_d.anneal import ITERATIONS, anneal
from tfpar.planning.inter_op.three_d.baselines import megatron
from tfpar.planning.inter_op.three_d.evaluation import StrategySearchResult
from tfpar.planning.inter_op.three_d.exhaustive import exhaustive
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.space import StrategySpace
from tfpar.planning.problem import Progress

FEW = 2000
"""Points that are priced in seconds."""


def search_strategies(
    model: StrategyProblem,
    *,
    seed: int = 0,
    iterations: int = ITERATIONS,
    seconds: float = math.inf,
    progress: Progress | None = None,
) -> StrategySearchResult:
    """Find the strategy that takes least as simulated, of those that searches come upon.

    Megatron's heuristic is among what is simulated: what is found is never worse.

    Args:
        seconds: after which the search ends with what it has. The same seed finds the same as long
            as it does not end so.
        progress: is called with each point that is priced: (degrees, points priced so far).

    Raises:
        PlanError: there is none; a MemoryLimitError if none fits.
    """
    starts = megatron(model)
    if StrategySpace(model).num_points <= FEW:
        return exhaustive(model, seconds=seconds, starts=starts, progress=progress)
    return anneal(
        model, seed=seed, iterations=iterations, seconds=seconds, starts=starts, progress=progress
    )
