"""Assignment of layers to stages whose devices and links differ (auto3d, Algorithm 2 `pipe_dp`,
equation 4).

A step takes what `cost.closed_form` says: its slowest stage counts once for each microbatch.
Algorithm 2 has a table over (layers, stages, slowest stage so far), the last of them any time that
some run of layers may take. Here there is a table over (layers, stages) for each limit of the
slowest stage, of which few have to be tried (`pipe_dp_table`). The optimum is the same.

A stage's place in the pipeline says how many microbatches it has in flight, so what it stores is
known within the program too. So is which way of running its layers takes least and fits, such as
computing them again in the backward pass: of what stores less where memory is short, each stage has
as much as it needs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from tfpar.cost.closed_form import pipeline_seconds
from tfpar.planning.inter_op.stages.pipe_dp_table import LayerCut, LayerWay, PipeDpTable
from tfpar.spec import MemoryLimitError, PlanError
from tfpar.spec.arguments import argument_error, finite, integer, number
from tfpar.spec.quantities import format_bytes


@dataclasses.dataclass(frozen=True)
class ChainLayer:
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
class ChainOption:
    """A way in which a stage may run its layers.

    Attributes:
        layers: all of the chain, run so.
        reserved_bytes: that a stage needs beside, whichever its layers are.
    """

    layers: Sequence[ChainLayer]
    reserved_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class StageDevice:
    """Device of a stage: its speed, its memory, and its link to the next stage.

    Attributes:
        speed: relative to the device that `ChainLayer.seconds` are of.
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
        options: the option that each stage takes, by its number.
    """

    counts: tuple[int, ...]
    seconds: float
    stage_seconds: tuple[float, ...]
    sent_seconds: tuple[float, ...]
    options: tuple[int, ...] = ()


def pipe_dp(
    layers: Sequence[ChainLayer] | Sequence[ChainOption],
    places: Sequence[StageDevice],
    microbatches: int,
    *,
    in_flight: Sequence[int] | None = None,
) -> LayerAssignment:
    """Assign the layers to stages, in their order, so that a step takes least by equation 4.

    Args:
        layers: or the ways in which a stage may run them, which send as much: it takes the one that
            takes least of those that fit, of equal ones the first.
        places: of the stages, in their order.
        in_flight: of each stage, the most microbatches that it keeps; by default as 1F1B has it.

    Raises:
        PlanError: there are more stages than layers; a MemoryLimitError if nothing fits, which says
            what is missing.
    """
    found = try_pipe_dp(layers, places, microbatches, in_flight=in_flight)
    if found is None:
        kept = in_flight or _of_1f1b(places, microbatches)
        raise _too_large(_options(layers), places, microbatches, kept)
    return found


def try_pipe_dp(
    layers: Sequence[ChainLayer] | Sequence[ChainOption],
    places: Sequence[StageDevice],
    microbatches: int,
    *,
    in_flight: Sequence[int] | None = None,
) -> LayerAssignment | None:
    """Return the assignment of `pipe_dp`, or None if nothing fits, which it takes a second program
    to explain.

    Raises:
        PlanError: there are more stages than layers.
    """
    integer("microbatches", microbatches, 1)
    options = _options(layers)
    count, number = len(places), len(options[0].layers)
    if not 1 <= count <= number:
        raise PlanError(f"{count} stages of {number} layers: there can be from 1 to {number}.")
    if in_flight is None:
        in_flight = _of_1f1b(places, microbatches)
    elif len(in_flight) != count:
        raise argument_error("in_flight", in_flight, f"{count} numbers, one for each stage")
    cuts = _cuts(options, places, in_flight)
    best = cuts.best(microbatches)
    return None if best is None else _assignment(cuts, best, microbatches)


def _options(layers: Sequence[ChainLayer] | Sequence[ChainOption]) -> list[ChainOption]:
    options = [one for one in layers if isinstance(one, ChainOption)]
    return options or [ChainOption([one for one in layers if isinstance(one, ChainLayer)])]


def _of_1f1b(places: Sequence[StageDevice], microbatches: int) -> list[int]:
    """Microbatches in flight of 1F1B."""
    return [min(microbatches, len(places) - stage) for stage in range(len(places))]


def _too_large(
    options: Sequence[ChainOption],
    places: Sequence[StageDevice],
    microbatches: int,
    in_flight: Sequence[int],
) -> MemoryLimitError:
    """Says what is missing in the assignment that would be the fastest."""
    unlimited = [dataclasses.replace(place, memory_bytes=math.inf) for place in places]
    cuts = _cuts(options, unlimited, in_flight)
    best = cuts.best(microbatches)
    assert best is not None, "any cut fits"
    ends = [0, *itertools.accumulate(best.counts)]
    stored = [cuts.stored(s, *run) for s, run in enumerate(itertools.pairwise(ends))]
    worst = max(range(len(places)), key=lambda s: stored[s] - places[s].memory_bytes)
    return MemoryLimitError(
        f"{len(options[0].layers)} layers do not fit into {len(places)} stages. In the fastest "
        f"assignment stage {worst} would store {format_bytes(stored[worst])} of the "
        f"{format_bytes(places[worst].memory_bytes)} it may, with {in_flight[worst]} microbatches "
        f"in flight. Use more stages, smaller microbatches or recompute.",
        stored[worst],
    )


def _cuts(
    options: Sequence[ChainOption], places: Sequence[StageDevice], in_flight: Sequence[int]
) -> PipeDpTable:
    return PipeDpTable(
        [
            LayerWay(
                [layer.seconds for layer in option.layers],
                [layer.fixed_bytes for layer in option.layers],
                [layer.kept_bytes for layer in option.layers],
                option.reserved_bytes,
            )
            for option in options
        ],
        [layer.sent_bytes for layer in options[0].layers],
        [place.speed for place in places],
        [place.bandwidth for place in places],
        [place.memory_bytes for place in places],
        in_flight,
    )


def _assignment(cuts: PipeDpTable, best: LayerCut, microbatches: int) -> LayerAssignment:
    ends = [0, *itertools.accumulate(best.counts)]
    own = tuple(
        cuts.seconds(s, *run, best.ways[s]) for s, run in enumerate(itertools.pairwise(ends))
    )
    sent = tuple(cuts.sent_seconds(s, end) for s, end in enumerate(ends[1:-1]))
    seconds = pipeline_seconds(microbatches, max(own), sum(own), sum(sent))
    return LayerAssignment(best.counts, seconds, own, sent, best.ways)
