"""Layers to stages whose devices and links differ (auto3d, Algorithm 2 `pipe_dp`, equation 4).

A microbatch takes t_s in stage s, and c_s on the way to the next. With m microbatches a step takes

    (m - 1) max_s t_s + sum_s t_s + sum_s c_s

Algorithm 2 has a table over (layers, stages, slowest stage so far), the last of them any time that
some run of layers may take. Here the table is over (layers, stages), and each entry holds its
*front*: of the ways to get there those of (slowest so far, sum so far) that no other beats in both.
With what the rest takes at least, most of a front cannot lead to less than a good solution that is
known from the start, and is dropped. The optimum is the same.

A stage's place in the pipeline says how many microbatches it has in flight, so what it stores is
known within the program too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tfpar.search.stages.bounds import SLACK
from tfpar.spec import MemoryLimitError, PlanError
from tfpar.spec.arguments import finite, integer, number, refused
from tfpar.spec.quantities import format_bytes


@dataclasses.dataclass(frozen=True)
class Layer:
    """A part of a model that reads of the one before.

    Attributes:
        seconds: of a microbatch, forward and backward, on a device of speed 1.
        sent_bytes: of a microbatch, to the next layer and back, if that is in another stage.
        fixed_bytes: that it holds all the time: weights, gradients, slots.
        kept_bytes: that it keeps of a microbatch until its backward pass.
    """

    seconds: float
    sent_bytes: float = 0.0
    fixed_bytes: float = 0.0
    kept_bytes: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            finite(field.name, getattr(self, field.name))


@dataclasses.dataclass(frozen=True)
class Place:
    """What a stage runs on.

    Attributes:
        speed: relative to the device that `Layer.seconds` are of.
        bandwidth: bytes/s to the next stage.
        memory_bytes: that it may store.
    """

    speed: float = 1.0
    bandwidth: float = math.inf
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            number(field.name, getattr(self, field.name), above=0)


@dataclasses.dataclass(frozen=True)
class LayerAssignment:
    """Layers in stages, one run of them after the other.

    Attributes:
        counts: layers of each stage.
        seconds: of a step, by equation 4.
        stage_seconds: of a microbatch in each stage.
        sent_seconds: of a microbatch on the way from each stage to the next.
    """

    counts: tuple[int, ...]
    seconds: float
    stage_seconds: tuple[float, ...]
    sent_seconds: tuple[float, ...]


def pipeline_seconds(
    stage_seconds: Sequence[float], sent_seconds: Sequence[float], microbatches: int
) -> float:
    """What a step takes (auto3d, equation 4)."""
    return (microbatches - 1) * max(stage_seconds) + sum(stage_seconds) + sum(sent_seconds)


def pipe_dp(
    layers: Sequence[Layer],
    places: Sequence[Place],
    microbatches: int,
    *,
    in_flight: Sequence[int] | None = None,
) -> LayerAssignment:
    """The layers in stages, in their order, that take least by equation 4.

    Args:
        places: of the stages, in their order.
        in_flight: of each stage, the most microbatches that it keeps; by default as 1F1B has it.

    Raises:
        PlanError: there are more stages than layers; a MemoryLimitError if nothing fits, which says
            what is missing.
    """
    found = fitting(layers, places, microbatches, in_flight=in_flight)
    if found is None:
        raise _too_large(layers, places, microbatches, in_flight or _of_1f1b(places, microbatches))
    return found


def fitting(
    layers: Sequence[Layer],
    places: Sequence[Place],
    microbatches: int,
    *,
    in_flight: Sequence[int] | None = None,
) -> LayerAssignment | None:
    """What `pipe_dp` returns; None if nothing fits, which it takes a second program to explain.

    Raises:
        PlanError: there are more stages than layers.
    """
    integer("microbatches", microbatches, 1)
    count = len(places)
    if not 1 <= count <= len(layers):
        raise PlanError(
            f"{count} stages of {len(layers)} layers: there can be from 1 to {len(layers)}."
        )
    if in_flight is None:
        in_flight = _of_1f1b(places, microbatches)
    elif len(in_flight) != count:
        raise refused("in_flight", in_flight, f"{count} numbers, one for each stage")
    return _Runs(layers, places, in_flight).best(microbatches)


def _of_1f1b(places: Sequence[Place], microbatches: int) -> list[int]:
    """Microbatches in flight of 1F1B."""
    return [min(microbatches, len(places) - stage) for stage in range(len(places))]


def _too_large(
    layers: Sequence[Layer],
    places: Sequence[Place],
    microbatches: int,
    in_flight: Sequence[int],
) -> MemoryLimitError:
    """Says what is missing in the assignment that would be the fastest."""
    unlimited = [dataclasses.replace(place, memory_bytes=math.inf) for place in places]
    runs = _Runs(layers, unlimited, in_flight)
    fastest = runs.best(microbatches)
    assert fastest is not None
    ends = [*itertools.accumulate(fastest.counts)]
    stored = [runs.stored(s, end - fastest.counts[s], end) for s, end in enumerate(ends)]
    worst = max(range(len(places)), key=lambda s: stored[s] - places[s].memory_bytes)
    return MemoryLimitError(
        f"{len(layers)} layers do not fit into {len(places)} stages. In the fastest assignment "
        f"stage {worst} would store {format_bytes(stored[worst])} of the "
        f"{format_bytes(places[worst].memory_bytes)} it may, with {in_flight[worst]} microbatches "
        f"in flight. Use more stages, smaller microbatches or recompute.",
        stored[worst],
    )


class _Way(NamedTuple):
    """A way to put the first layers into the first stages.

    Attributes:
        slowest: seconds of its slowest stage.
        total: seconds of its stages and of what they send.
        start: the first layer of its last stage.
        before: the way of the stages before that.
    """

    slowest: float
    total: float
    start: int
    before: _Way | None


class _Runs:
    """What runs of layers take in each stage."""

    def __init__(
        self, layers: Sequence[Layer], places: Sequence[Place], in_flight: Sequence[int]
    ) -> None:
        self.layers = layers
        self.places = places
        self.in_flight = in_flight
        self._seconds = [0.0, *itertools.accumulate(x.seconds for x in layers)]
        self._fixed = [0.0, *itertools.accumulate(x.fixed_bytes for x in layers)]
        self._kept = [0.0, *itertools.accumulate(x.kept_bytes for x in layers)]

    def seconds(self, stage: int, start: int, end: int) -> float:
        """Of a microbatch in the layers from `start` to `end`, which is left out."""
        return (self._seconds[end] - self._seconds[start]) / self.places[stage].speed

    def sent_seconds(self, stage: int, end: int) -> float:
        """Of a microbatch from a stage that ends before layer `end` to the next, if any."""
        if stage == len(self.places) - 1:
            return 0.0
        return self.layers[end - 1].sent_bytes / self.places[stage].bandwidth

    def stored(self, stage: int, start: int, end: int) -> float:
        """Bytes of these layers."""
        kept = self._kept[end] - self._kept[start]
        return self._fixed[end] - self._fixed[start] + self.in_flight[stage] * kept

    def best(self, microbatches: int) -> LayerAssignment | None:
        """The fastest assignment that fits, if any does."""
        slowest = self._least(lambda own, sent, rest: max(own, rest))[0][0]
        if math.isinf(slowest):
            return None
        total = self._least(lambda own, sent, rest: own + sent + rest)
        known = self._least(
            lambda own, sent, rest: own + sent + rest if own <= slowest else math.inf
        )
        more = microbatches - 1
        limit = (more * slowest + known[0][0]) * (1 + SLACK)
        fronts: list[list[_Way]] = [[_Way(0.0, 0.0, 0, None)], *([] for _ in self.layers)]
        for stage in range(len(self.places)):
            rest = total[stage + 1]
            found: list[list[_Way]] = [[] for _ in fronts]
            for end in range(stage + 1, len(fronts)):
                ways = [
                    way
                    for way in self._ways(stage, end, fronts)
                    if more * max(way.slowest, slowest) + way.total + rest[end] <= limit
                ]
                found[end] = _front(ways)
            fronts = found
        return self._assignment(
            min(fronts[-1], key=lambda way: more * way.slowest + way.total), microbatches
        )

    def _runs(self, stage: int, end: int) -> Iterator[int]:
        """Where a run in `stage` that ends before layer `end` may start: the nearest first."""
        for start in reversed(range(stage, end)):
            if self.stored(stage, start, end) > self.places[stage].memory_bytes:
                return
            yield start

    def _least(self, combine: Callable[[float, float, float], float]) -> list[list[float]]:
        """[stage][start]: the least of all ways to put the layers from `start` on into the stages
        from `stage` on.

        Args:
            combine: seconds of a stage, of what it sends, and of the rest.
        """
        count = len(self.layers)
        table = [[math.inf] * (count + 1) for _ in range(len(self.places) + 1)]
        table[-1][count] = 0.0
        for stage in reversed(range(len(self.places))):
            for end in range(stage + 1, count + 1):
                rest, sent = table[stage + 1][end], self.sent_seconds(stage, end)
                if not math.isinf(rest):
                    for start in self._runs(stage, end):
                        whole = combine(self.seconds(stage, start, end), sent, rest)
                        table[stage][start] = min(table[stage][start], whole)
        return table

    def _ways(self, stage: int, end: int, fronts: Sequence[Sequence[_Way]]) -> Iterator[_Way]:
        """All ways to end `stage` before layer `end`."""
        sent = self.sent_seconds(stage, end)
        for start in self._runs(stage, end):
            own = self.seconds(stage, start, end)
            for way in fronts[start]:
                yield _Way(max(way.slowest, own), way.total + own + sent, start, way)

    def _assignment(self, way: _Way, microbatches: int) -> LayerAssignment:
        starts, at = [], way
        while at.before is not None:
            starts.append(at.start)
            at = at.before
        starts.reverse()
        ends = [*starts[1:], len(self.layers)]
        runs = [*enumerate(zip(starts, ends, strict=True))]
        own = tuple(self.seconds(stage, start, end) for stage, (start, end) in runs)
        sent = tuple(self.sent_seconds(stage, end) for stage, (_, end) in runs)[:-1]
        counts = tuple(end - start for _, (start, end) in runs)
        return LayerAssignment(counts, pipeline_seconds(own, sent, microbatches), own, sent)


def _front(ways: list[_Way]) -> list[_Way]:
    """Those that no other beats, in the slowest stage and in total."""
    front: list[_Way] = []
    for way in sorted(ways, key=lambda way: way[:2]):
        if not front or way.total < front[-1].total:
            front.append(way)
    return front
