"""What searches have in common: points priced once each, bounds, and the decision at the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from tfpar.search.three_d.durations import widest_link
from tfpar.search.three_d.model import Model
from tfpar.search.three_d.price import quick_seconds, simulated
from tfpar.search.three_d.space import Degrees, Point, Space
from tfpar.search.three_d.strategy import Strategy
from tfpar.search.three_d.table import Case
from tfpar.spec import MemoryLimitError

FINALISTS = 8
"""How many strategies are simulated: of a ranking by formulas the best ones."""


@dataclasses.dataclass(frozen=True)
class Priced:
    """A strategy and the seconds of a step: by formulas, and as simulated if that was done."""

    strategy: Strategy
    quick_s: float
    simulated_s: float = math.nan


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search chose.

    Attributes:
        best: the strategy that is fastest as simulated.
        finalists: all that were simulated, the fastest first.
        evaluated: how many points were priced.
        complete: every point was priced, or cannot be better than the best one.
    """

    best: Priced
    finalists: tuple[Priced, ...]
    evaluated: int
    complete: bool = False


class Evaluation:
    """The points of a space, priced by equations 1 to 4, each once."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.found: dict[Point, Priced | None] = {}
        self._given: list[Priced] = []

    def price(self, point: Point) -> float:
        """Seconds of a step; infinite if the point does not fit into memory."""
        if point not in self.found:
            strategy = self.space.strategy(point)
            self.found[point] = (
                None
                if strategy is None
                else Priced(strategy, quick_seconds(self.space.model, strategy))
            )
        known = self.found[point]
        return math.inf if known is None else known.quick_s

    def add(self, strategies: Iterable[Strategy]) -> None:
        """Let these be compared at the end too."""
        model = self.space.model
        self._given += [Priced(one, quick_seconds(model, one)) for one in strategies]

    def ranked(self) -> list[Priced]:
        """All that fit, the fastest first; of equal ones the one that was priced first."""
        priced = [priced for priced in self.found.values() if priced is not None]
        return sorted([*self._given, *priced], key=lambda priced: priced.quick_s)

    def chosen(self, complete: bool = False) -> Found:
        """What a search ends with that has priced these points.

        Raises:
            MemoryLimitError: none of them fits.
        """
        ranked = self.ranked()
        model = self.space.model
        if not ranked:
            raise MemoryLimitError(
                f"None of {len(self.found)} strategies fits into the memory of "
                f"{model.cluster.name!r}. Use smaller microbatches, recompute, or more devices.",
                math.inf,
            )
        finalists = _decide(model, [*ranked[:FINALISTS], *self._given])
        return Found(finalists[0], finalists, len(self.found), complete)


def _decide(model: Model, candidates: Iterable[Priced]) -> tuple[Priced, ...]:
    """Candidates as simulated, the fastest first."""
    found = {
        priced.strategy: dataclasses.replace(
            priced, simulated_s=simulated(model, priced.strategy).seconds
        )
        for priced in candidates
    }
    return tuple(sorted(found.values(), key=lambda priced: priced.simulated_s))


def lower_bound(model: Model, degrees: Degrees) -> float:
    """Seconds that no placement of these degrees is below, by equations 1 to 4.

    Every layer on the device that is fastest with it, the slowest actor no faster than the mean;
    the gradients of an actor no fewer than the mean, on rings of the cluster's widest link.
    """
    data, tensor, microbatch, virtual = degrees
    table, actors = model.table, model.cluster.size // (data * tensor)
    names = {device.name for device in model.cluster.devices}
    cases = [Case(name, tensor, microbatch) for name in names]
    least = {
        name: min(sum(table.passes(name, case)) for case in cases) for name in set(table.layers)
    }
    whole = sum(least[layer] for layer in table.layers)
    microbatches = model.batch // (data * microbatch)
    pipeline = (microbatches - 1 / virtual) * whole / actors + whole / virtual
    if data == 1:
        return pipeline
    kinds = [table.kind(layer) for layer in range(len(table))]
    gradients = sum(kind.gradient_bytes for kind in kinds)
    moved = 2 * gradients
    if any(kind.slot_bytes for kind in kinds):
        moved = min(moved, gradients + sum(kind.weight_bytes for kind in kinds))
    return pipeline + moved / actors / tensor / widest_link(model.cluster)
