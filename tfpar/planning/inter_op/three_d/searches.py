"""Searches for 3-D strategies by name, with the strategies that each ranks first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tfpar.planning.inter_op.three_d.anneal import ITERATIONS, anneal
from tfpar.planning.inter_op.three_d.baselines import megatron, random_search
from tfpar.planning.inter_op.three_d.cost_model import simulate_strategy
from tfpar.planning.inter_op.three_d.evaluation import StrategySearchResult
from tfpar.planning.inter_op.three_d.exhaustive import exhaustive
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.space import StrategySpace
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.planning.problem import Progress

FEW = 2000
"""Points that are priced in seconds."""


class Ranked(NamedTuple):
    """A strategy, and the seconds that a step is simulated to take, or takes at least."""

    strategy: Strategy3D
    seconds: float


def ranked_strategies(
    model: StrategyProblem,
    search: str,
    *,
    seed: int = 0,
    seconds: float = math.inf,
    progress: Progress | None = None,
) -> list[Ranked]:
    """Run a search and return the strategies that it simulates, the fastest first.

    Args:
        search: "anneal", "exhaustive", "random" or "megatron".
        seed: of what draws strategies at random.
        seconds: after which a search that can ends with what it has.
        progress: is called with each point that is priced.

    Raises:
        PlanError: there is no strategy; a MemoryLimitError if none fits.
    """
    if search == "megatron":
        return simulated(model, megatron(model))
    found: StrategySearchResult
    if search == "random":
        found = random_search(model, seed=seed, seconds=seconds, progress=progress)
    elif search == "exhaustive":
        found = exhaustive(model, seconds=seconds, starts=megatron(model), progress=progress)
    else:
        starts = megatron(model)
        found = anneal(model, seed=seed, seconds=seconds, starts=starts, progress=progress)
    ranked = [Ranked(priced.strategy, priced.simulated_s) for priced in found.finalists]
    ranked += [Ranked(priced.strategy, priced.bound_s) for priced in found.others]
    return sorted(ranked, key=lambda one: one.seconds)


def simulated(model: StrategyProblem, strategies: Iterable[Strategy3D]) -> list[Ranked]:
    """Simulate strategies and return them, the fastest first."""
    found = [Ranked(one, simulate_strategy(model, one).seconds) for one in strategies]
    return sorted(found, key=lambda ranked: ranked.seconds)


def best_of_kinds(ranked: Iterable[Ranked]) -> Iterator[Ranked]:
    """Yield the best of those that differ in more than microbatches and in what is done to store
    less: in degrees, stages of an actor, or placement."""
    seen = set()
    for one in ranked:
        strategy = one.strategy
        kind = strategy.layout(0).degrees, strategy.stages, strategy.virtual, strategy.ranks
        if kind not in seen:
            seen.add(kind)
            yield one


def find(
    model: StrategyProblem,
    *,
    seed: int = 0,
    iterations: int = ITERATIONS,
    seconds: float = math.inf,
    progress: Progress | None = None,
) -> StrategySearchResult:
    """The strategy that takes least as simulated, of those that searches come upon.

    Megatron's heuristic is among what is simulated: what is found is never worse.

    Args:
        seconds: after which the search ends with what it has. The same seed finds the same as long
            as it does not end so.
        progress: is told of each point that is priced: (degrees, points priced so far).

    Raises:
        PlanError: there is none; a MemoryLimitError if none fits.
    """
    starts = megatron(model)
    if StrategySpace(model).num_points <= FEW:
        return exhaustive(model, seconds=seconds, starts=starts, progress=progress)
    return anneal(
        model, seed=seed, iterations=iterations, seconds=seconds, starts=starts, progress=progress
    )
