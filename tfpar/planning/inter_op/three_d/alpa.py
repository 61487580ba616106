"""Alpa's two levels (Zheng et al. 2022, §5): stages on submeshes of different sizes.

The inner level takes, for a run of layers on a submesh, the shape (data x tensor) of it that takes
least of a microbatch and fits. The outer one puts layers and devices into stages:

    T = sum_s t_s + (M - 1) max_s t_s          of M microbatches, t_s of one in stage s
                                               (`cost.closed_form`, with nothing sent)

For each t_max in turn that any stage may take, the least sum of stages of at most that long is

    F(s, k, d) = min over submeshes of n devices and ends i of
                 t(k..i, n, s) + F(s - 1, i, d - n)        of layers from k on, s stages, d devices

with s also saying how many microbatches the stage has in flight. Larger t_max are left out once (M
- 1) t_max alone is more than the best T. As in the paper all machines count as equal (here, to the
slowest device and link), and what stages send counts nothing.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfpar.cluster.description import Cluster
from tfpar.cost.closed_form import pipeline_seconds
from tfpar.planning.inter_op.three_d.cost_table import LayerExchange, LayerLayout, LayoutDegrees
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.planning.inter_op.three_d.time_terms import exchange_seconds, packed
from tfpar.spec import PlanError


class AlpaStage(NamedTuple):
    """Layers on a submesh: copies that share a microbatch, each split over tensor ranks, and
    experts over some of the copies."""

    layers: range
    data: int
    tensor: int
    experts: int = 1

    @property
    def degrees(self) -> LayoutDegrees:
        """The degrees of its layout."""
        return LayoutDegrees(self.data, self.tensor, self.experts)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.degrees.size


@dataclasses.dataclass(frozen=True)
class AlpaPlan:
    """Plan of Alpa's two levels: stages, each on a submesh, and their microbatch.

    Attributes:
        stages: in order; they take the ranks of the cluster one after the other.
        microbatch: samples, of all copies of a stage together.
        seconds: of a step, by the objective of the outer level.
    """

    stages: tuple[AlpaStage, ...]
    microbatch: int
    seconds: float

    def strategy(self) -> Strategy3D | None:
        """Convert the plan to a strategy, whose stages are equal; None if they are not."""
        shapes = {stage.degrees for stage in self.stages}
        if len(shapes) > 1:
            return None
        ((data, tensor, experts),) = shapes
        counts = tuple(len(stage.layers) for stage in self.stages)
        return Strategy3D(data, tensor, self.microbatch // data, counts, experts=experts)

    def __str__(self) -> str:
        stages = " + ".join(f"{len(s.layers)} on {s.degrees}" for s in self.stages)
        return f"{len(self.stages)} stages, microbatches of {self.microbatch}, layers {stages}"


def alpa(model: StrategyProblem, equal: bool = False) -> AlpaPlan:
    """Find the plan that takes least by the objective of the outer level.

    Args:
        model: on equal devices; `baselines.alpa` makes them so.
        equal: all stages have submeshes of one shape.

    Raises:
        PlanError: nothing fits, or the machines are not equal.
    """
    if len({device.name for device in model.cluster.devices}) > 1:
        raise PlanError("Alpa takes all devices to be alike; give it the slowest in place of each.")
    best: AlpaPlan | None = None
    for microbatch in _microbatches(model):
        stages = SubmeshCosts(model, microbatch)
        for some in stages.of_one_shape() if equal else [stages]:
            limit = math.inf if best is None else best.seconds
            best = _best(some, limit) or best
    if best is None:
        raise PlanError(f"No strategy fits into the memory of {model.cluster.name!r}.")
    return best


def submesh_sizes(cluster: Cluster) -> list[int]:
    """Return how many devices a submesh can have: powers of two within a machine, or whole
    machines."""
    machines = cluster.machines
    each = machines.count(machines[0])
    within = [2**power for power in range(each.bit_length()) if 2**power < each]
    return [*within, *(n * each for n in range(1, len(machines) // each + 1))]


class _Priced(NamedTuple):
    """A shape of a submesh, with some layers; kept bytes are those of a microbatch."""

    seconds: float
    degrees: LayoutDegrees
    fixed_bytes: float
    kept_bytes: float


class SubmeshCosts:
    """Costs of runs of layers on submeshes: the inner level.

    Args:
        shape: the only one that a submesh may have, if any.

    Attributes:
        count: of microbatches.
        sizes: devices of each submesh; see `submesh_sizes`.
    """

    def __init__(
        self, model: StrategyProblem, microbatch: int, shape: LayoutDegrees | None = None
    ) -> None:
        self.model, self.microbatch, self._shape = model, microbatch, shape
        self.count = model.batch // microbatch
        self._priced: dict[tuple[tuple[tuple[str, int], ...], int], list[_Priced]] = {}
        self.sizes = submesh_sizes(model.cluster)
        if shape is not None:
            self.sizes = [size for size in self.sizes if size == shape.size]

    def of_one_shape(self) -> Iterator[SubmeshCosts]:
        """Yield the costs with submeshes of one shape, for each shape that there is."""
        for size in self.sizes:
            if self.model.cluster.size % size == 0:
                for shape in self._shapes(size):
                    yield SubmeshCosts(self.model, self.microbatch, shape)

    def best(self, layers: range, size: int, in_flight: int) -> tuple[float, AlpaStage | None]:
        """Return the seconds of a microbatch, its share of the sum of gradients included, and the
        shape."""
        kinds = tuple(sorted(collections.Counter(map(self._name, layers)).items()))
        if (kinds, size) not in self._priced:
            self._priced[kinds, size] = [self._price(kinds, shape) for shape in self._shapes(size)]
        alive, memory = min(in_flight, self.count), self.model.cluster.devices[0].memory_bytes
        fitting = [
            (priced.seconds, AlpaStage(layers, *priced.degrees))
            for priced in self._priced[kinds, size]
            if priced.fixed_bytes + alive * priced.kept_bytes <= memory
        ]
        return min(fitting, default=(math.inf, None), key=lambda pair: pair[0])

    def _name(self, layer: int) -> str:
        return self.model.table.layers[layer]

    def _shapes(self, size: int) -> Iterator[LayoutDegrees]:
        device = self.model.cluster.devices[0].name
        if self._shape is not None:
            yield self._shape
            return
        for tensor in sorted({tensor for tensor, _ in self.model.table.shapes}):
            data, rest = divmod(size, tensor)
            if rest or not data or self.microbatch % data:
                continue
            for experts in self.model.table.expert_degrees:
                layout = LayerLayout(data, tensor, self.microbatch // data, experts)
                if data % experts == 0 and self.model.table.has([device], layout):
                    yield layout.degrees

    def _price(self, kinds: tuple[tuple[str, int], ...], shape: LayoutDegrees) -> _Priced:
        table = self.model.table
        layout = LayerLayout(shape.data, shape.tensor, self.microbatch // shape.data, shape.experts)
        device, part = self.model.cluster.devices[0].name, _first(self.model.cluster, shape.size)
        seconds = fixed = kept = update = 0.0
        once: list[LayerExchange] = []
        sizes: tuple[int, ...] = ()
        for name, count in kinds:
            cost = table.cost(name, layout)
            exchanged = exchange_seconds((*cost.forward, *cost.backward), cost.sizes, part)
            seconds += count * (sum(table.passes(name, device, layout)) + exchanged)
            fixed += count * cost.fixed_bytes
            kept += count * cost.kept_bytes
            once += [*cost.sums, *cost.gathers] * count
            update += count * cost.update_s.get(device, 0.0)
            sizes = cost.sizes
        sync = (exchange_seconds(packed(once), sizes, part) + update) / self.count
        return _Priced(seconds + sync, shape, fixed, kept)


def _best(stages: SubmeshCosts, limit: float) -> AlpaPlan | None:
    """The outer level, of one microbatch size; None if it takes `limit` or more."""
    layers, devices = len(stages.model.table), stages.model.cluster.size
    most = min(layers, devices)
    seconds = np.full((most + 1, len(stages.sizes), layers, layers + 1), math.inf)
    shapes: dict[tuple[int, ...], AlpaStage | None] = {}
    for left in range(1, most + 1):
        for at, size in enumerate(stages.sizes):
            for start in range(layers):
                for end in range(start + 1, layers + 1):
                    key = left, at, start, end
                    seconds[key], shapes[key] = stages.best(range(start, end), size, left)
    best, runs = limit, None
    candidates = np.unique(seconds[np.isfinite(seconds)])

    def under(at: int) -> tuple[float, list[tuple[int, ...]]]:
        allowed = np.where(seconds <= candidates[at], seconds, math.inf)
        return _under(allowed, stages.sizes, devices)

    # Below the first of them with which the stages hold all layers there is nothing.
    first = bisect.bisect_left(range(len(candidates)), True, key=lambda at: under(at)[0] < math.inf)
    for at in range(first, len(candidates)):
        longest = float(candidates[at])
        if pipeline_seconds(stages.count, longest, 0.0) >= best:
            break
        total, chosen = under(at)
        taken = pipeline_seconds(stages.count, longest, total)
        if taken < best:
            best, runs = taken, chosen
    if runs is None:
        return None
    found = [shape for run in runs if (shape := shapes[run]) is not None]
    return AlpaPlan(tuple(found), stages.microbatch, best)


def _under(
    seconds: NDArray[np.float64], sizes: list[int], devices: int
) -> tuple[float, list[tuple[int, ...]]]:
    """F(s, 0, D) at its least over s, and the runs of layers on submeshes that it is of."""
    most, layers = seconds.shape[0] - 1, seconds.shape[2]
    least = np.full((most + 1, layers + 1, devices + 1), math.inf)
    least[0, layers, 0] = 0.0
    for left in range(1, most + 1):
        for at, size in enumerate(sizes):
            rest = least[left - 1, :, : devices + 1 - size]
            sums = (seconds[left, at][:, :, None] + rest[None]).min(axis=1)
            own = least[left, :layers, size:]
            np.minimum(own, sums, out=own)
    left = int(np.argmin(least[:, 0, devices]))
    total = float(least[left, 0, devices])
    runs: list[tuple[int, ...]] = []
    start, free = 0, devices
    while total < math.inf and left:
        run, free = next(
            ((left, at, start, end), free - size)
            for at, size in enumerate(sizes)
            if size <= free
            for end in range(start + 1, layers + 1)
            if seconds[left, at, start, end] + least[left - 1, end, free - size]
            == least[left, start, free]
        )
        runs.append(run)
        left, start = left - 1, run[-1]
    return total, runs


def _microbatches(model: StrategyProblem) -> list[int]:
    """Sizes of microbatches, of all copies together, that divide the batch."""
    own = {microbatch for _, microbatch in model.table.shapes}
    found = {size * data for size in own for data in range(1, model.cluster.size + 1)}
    return sorted(size for size in found if model.batch % size == 0)


@functools.lru_cache(maxsize=1024)
def _first(cluster: Cluster, size: int) -> Cluster:
    return cluster.part(range(size))
