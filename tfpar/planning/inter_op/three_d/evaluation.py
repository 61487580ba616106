"""Evaluation of strategies, common to all searches: points priced once each, lower bounds, and the
decision at the end."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable

from tfpar.planning.inter_op.three_d.cost_model import lower_bound_seconds, simulate_strategy
from tfpar.planning.inter_op.three_d.cost_table import LayerCost, LayerLayout
from tfpar.planning.inter_op.three_d.memory import stored_bytes
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.space import (
    ParallelDegrees,
    StrategyPoint,
    StrategySpace,
    even,
)
from tfpar.planning.inter_op.three_d.strategy import MemoryOptions, Strategy3D
from tfpar.planning.inter_op.three_d.time_terms import widest_link
from tfpar.planning.problem import Progress
from tfpar.spec import MemoryLimitError
from tfpar.spec.quantities import format_bytes

PATIENCE = 16
"""After how many strategies in a row that are no better a search simulates no more of them. Bounds
are nearly what is simulated where few transfers meet; where many do, more have to be tried."""


@dataclasses.dataclass(frozen=True)
class StrategyCandidate:
    """A strategy and the seconds of a step: a bound, and as simulated if that was done."""

    strategy: Strategy3D
    bound_s: float
    simulated_s: float = math.nan


@dataclasses.dataclass(frozen=True)
class StrategySearchResult:
    """Result of a strategy search: the best strategy, the finalists, and whether it is proven
    optimal.

    Attributes:
        best: the strategy that is fastest as simulated.
        finalists: all that were simulated, the fastest first.
        others: all that were priced and fit, but were not simulated, those with the least bound
            first.
        evaluated: how many points were priced.
        complete: every point was simulated, or cannot be better than the best one.
    """

    best: StrategyCandidate
    finalists: tuple[StrategyCandidate, ...]
    evaluated: int
    complete: bool = False
    others: tuple[StrategyCandidate, ...] = ()


class Evaluation:
    """The points of a space, each bounded once, and simulated once if that is asked for.

    Args:
        progress: is called with each point that is priced.

    Attributes:
        best_s: the least seconds that were simulated.
    """

    def __init__(self, space: StrategySpace, progress: Progress | None = None) -> None:
        self.space = space
        self._progress = progress
        self.found: dict[StrategyPoint, StrategyCandidate | None] = {}
        self.best_s = math.inf
        self._given: list[StrategyCandidate] = []
        self._simulated: dict[Strategy3D, float] = {}

    def price(self, point: StrategyPoint) -> float:
        """Return the seconds that a step takes at least; infinite if the point does not fit into
        memory."""
        if point not in self.found:
            found = self.space.bounded(point)
            self.found[point] = None if found is None else StrategyCandidate(*found)
            if self._progress is not None:
                what = point.degrees.on(self.space.model.cluster.size)
                self._progress(what, len(self.found))
        known = self.found[point]
        return math.inf if known is None else known.bound_s

    def simulate(self, point: StrategyPoint) -> float:
        """Return the seconds of a step as simulated; infinite if the point does not fit into
        memory."""
        self.price(point)
        known = self.found[point]
        return math.inf if known is None else self._simulate(known)

    def known(self, point: StrategyPoint) -> float:
        """Return the seconds of a priced point as simulated, or at least where it was not."""
        found = self.found[point]
        if found is None:
            return math.inf
        return self._simulated.get(found.strategy, found.bound_s)

    def add(self, strategies: Iterable[Strategy3D]) -> None:
        """Let these be compared at the end too."""
        model = self.space.model
        self._given += [
            StrategyCandidate(one, lower_bound_seconds(model, one)) for one in strategies
        ]

    def ranked(self) -> list[StrategyCandidate]:
        """Return all candidates that fit, those with the least bound first; of equal ones what was
        priced first."""
        priced = [priced for priced in self.found.values() if priced is not None]
        return sorted([*self._given, *priced], key=lambda priced: priced.bound_s)

    def chosen(
        self, patience: float = PATIENCE, over: Callable[[], bool] = lambda: False
    ) -> StrategySearchResult:
        """Choose the point that is fastest as simulated, which ends a search that has priced these
        points.

        Those with the least bound are simulated first, until the next one cannot be better.

        Args:
            patience: after how many in a row that are no better no more are simulated.
            over: whether the time is; then no more are simulated either.

        Raises:
            MemoryLimitError: none of them fits.
        """
        ranked = self.ranked()
        if not ranked:
            raise infeasible_error(self.space, len(self.found))
        for priced in self._given:
            self._simulate(priced)
        idle, complete = 0, True
        for priced in ranked:
            if priced.bound_s >= self.best_s:
                break
            if self._simulated and (idle >= patience or over()):
                complete = False
                break
            before = self.best_s
            idle = 0 if self._simulate(priced) < before else idle + 1
        finalists = {
            priced.strategy: dataclasses.replace(priced, simulated_s=seconds)
            for priced in ranked
            if (seconds := self._simulated.get(priced.strategy)) is not None
        }
        ordered = tuple(sorted(finalists.values(), key=lambda priced: priced.simulated_s))
        others = tuple(priced for priced in ranked if priced.strategy not in finalists)
        return StrategySearchResult(ordered[0], ordered, len(self.found), complete, others)

    def _simulate(self, priced: StrategyCandidate) -> float:
        if priced.strategy not in self._simulated:
            seconds = simulate_strategy(self.space.model, priced.strategy).seconds
            self._simulated[priced.strategy] = seconds
            self.best_s = min(self.best_s, seconds)
        return self._simulated[priced.strategy]


def lower_bound(model: StrategyProblem, degrees: ParallelDegrees) -> float:
    """Return the seconds that no placement of these degrees is below, as simulated.

    Every layer on the device that is fastest with it, without what ranks exchange: W seconds of a
    microbatch, of M, in A actors. Some actor computes all microbatches in no less than the mean,
    and then its gradients are summed, no fewer than the mean, on rings of the cluster's widest
    link, hidden behind no more than a microbatch of it. That an actor is slower hides no more than
    it takes. In 1F1B some microbatch goes through all stages besides (`_of_1f1b`).
    """
    data, tensor, microbatch, virtual, experts = degrees
    table, cluster = model.table, model.cluster
    actors = cluster.size // (data * tensor)
    devices = {device.name for device in cluster.devices}
    layout = LayerLayout(data, tensor, microbatch, experts)
    counts = collections.Counter(table.layers)
    each = {name: [table.passes(name, one, layout) for one in devices] for name in counts}
    whole = sum(count * min(map(sum, each[name])) for name, count in counts.items())
    passes = [one for found in each.values() for one in found if sum(one)]
    microbatches = model.batch // (data * microbatch)
    pipeline = whole
    if virtual == 1:
        forward = max((one.forward / sum(one) for one in passes), default=0.0)
        pipeline = _of_1f1b(whole, actors, microbatches, forward)
    layouts = [layout, layout._replace(shard_slots=True)][: 1 + table.can_shard_slots]
    moved = min(
        sum(count * _moved_bytes(table.cost(name, one)) for name, count in counts.items())
        for one in layouts
    )
    summing = moved / widest_link(cluster)
    exposed = max(0.0, summing - cluster.overlap * whole)
    return max(pipeline, (microbatches * whole + exposed) / actors)


def _of_1f1b(whole: float, actors: int, microbatches: int, forward: float) -> float:
    """Of stages that take `whole` seconds of a microbatch together, cut as is best.

    With t_i of each, T is no less than what comes before and after stage i and all it does,
    sum_{j < i} t_j + M t_i, which is least where all these are equal; nor than a microbatch that
    goes through all, and what stage i then has left to do: W + (M - 1) t_i less the forward passes
    that it has done meanwhile, of as many more microbatches as it may have in flight.

    Args:
        forward: what part of a layer's seconds the forward pass is, at most.
    """
    filled = whole / (1 - (1 - 1 / microbatches) ** actors)
    left = [
        microbatches - 1 - forward * (min(microbatches, actors - stage) - 1)
        for stage in range(actors)
    ]
    through = whole
    if min(left) > 0:
        through += whole / sum(1 / more for more in left)
    return max(filled, through)


def _moved_bytes(cost: LayerCost) -> float:
    """That each rank sends at least to sum a layer's gradients, and for what follows on it: in
    rings."""
    found = 0.0
    for kind, axes, num_bytes, times in (*cost.sums, *cost.gathers):
        group = math.prod(cost.sizes[axis] for axis in axes)
        found += _RING_PASSES.get(kind, 0) * times * (1 - 1 / group) * num_bytes
    return found


_RING_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""Times that each rank sends a part of the payload on, by collective kind."""


# --- Error for a cluster on which no strategy fits ---


def infeasible_error(space: StrategySpace, tried: int) -> MemoryLimitError:
    """Return the error that none of the strategies that were tried fits.

    The nearest is the one of which a rank needs least, compared with what its device has: with all
    that stores less, and as many layers in each stage, on ranks in their order.
    """
    model = space.model
    memory = MemoryOptions(
        recompute=model.table.can_recompute,
        shard_slots=model.table.can_shard_slots,
    )
    nearest = min(
        (dataclasses.replace(even(model, d), memory=memory) for d in space.degrees),
        key=lambda strategy: max(
            needed / there for needed, there in _needed(model, strategy).values()
        ),
    )
    by_actor = _needed(model, nearest)
    actor = max(by_actor, key=lambda actor: by_actor[actor][0] / by_actor[actor][1])
    needed, there = by_actor[actor]
    device = min(
        (model.cluster.devices[rank] for rank in nearest.stage(actor)),
        key=lambda device: device.memory_bytes,
    )
    text = (
        f"None of {tried} strategies that were tried fits into the memory of "
        f"{model.cluster.name!r}. "
    )
    if needed <= there:
        return MemoryLimitError(f"{text}Another does ({nearest}): search for longer.", needed)
    return MemoryLimitError(
        f"{text}The nearest ({nearest}) needs {format_bytes(needed)} on a "
        f"{device.name or 'device'} with {format_bytes(there)}, {format_bytes(needed - there)} "
        f"more than there is. {_advice(model, nearest, actor, there)}",
        needed,
    )


def _needed(model: StrategyProblem, strategy: Strategy3D) -> dict[int, tuple[float, float]]:
    """Of each actor, what a rank stores, and what the smallest of its devices holds."""
    devices = model.cluster.devices
    return {
        actor: (stored, min(devices[rank].memory_bytes for rank in strategy.stage(actor)))
        for actor, stored in enumerate(stored_bytes(model, strategy))
    }


def _advice(model: StrategyProblem, strategy: Strategy3D, actor: int, there: float) -> str:
    table = model.table
    held = sum(
        table.cost_of(layer, strategy.layout).fixed_bytes
        for stage in strategy.stages_of(actor)
        for layer in strategy.runs[stage]
    )
    if held > there:
        advice = "Use more devices, or devices with more memory"
        if not strategy.memory.shard_slots:
            advice += "; give the layers' slot_bytes, so that copies can share slots out"
    else:
        advice = "Use smaller microbatches, or more devices"
        if not strategy.memory.recompute:
            advice += "; give all layers' input_bytes, so that they can be computed again"
    return f"Weights, gradients and slots alone are {format_bytes(held)}. {advice}."
