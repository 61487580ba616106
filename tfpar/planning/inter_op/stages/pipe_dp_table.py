"""Dynamic program behind `pipe_dp`: cuts of a chain of layers, over arrays.

A step takes (m - 1) T + total(T) (`cost.closed_form`), where T is what the slowest stage may take
of a microbatch, and total(T) the least that all stages and what they send take if none takes longer
than T. So

    T_min       F(k, e) = min over s of max(F(k - 1, s), t(k, s..e)), of the first e layers in the
                first k stages
    total(T)    F(k, e) = min over s of F(k - 1, s) + t(k, s..e) + c(k, e). Runs of layers that may
                be a stage start in a window, which moves on with e: its least is found with a table
                of the least of 1, 2, 4, ... entries

and of T above T_min only what some run of layers takes has to be tried. A stage may run its layers
in several ways, which take and store more or less: t(k, s..e) is then that of the quickest way that
fits, and each way has a window of its own. total(T) never rises with
T: between two values of T that were tried, no step takes less than the smaller of them with the
total of the larger, which leaves few.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfpar.cost.closed_form import pipeline_seconds
from tfpar.planning.inter_op.stages.bounds import SLACK

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

TOGETHER = 32
"""Number of values of T that are tried at once."""


class LayerCut(NamedTuple):
    """Layers of each stage, the way in which it runs them, and seconds: of the slowest stage, and
    of all with what they send."""

    counts: tuple[int, ...]
    ways: tuple[int, ...]
    slowest: float
    total: float


class LayerWay:
    """A way to run layers, whichever stage does.

    Args:
        seconds, fixed, kept: of each layer, as those of `pipe_dp.ChainLayer`.
        reserved: bytes that a stage needs beside, whichever its layers are.
    """

    def __init__(
        self,
        seconds: Sequence[float],
        fixed: Sequence[float],
        kept: Sequence[float],
        reserved: float = 0.0,
    ) -> None:
        self.sums = [0.0, *itertools.accumulate(seconds)]
        self.seconds = np.array(self.sums)
        self.fixed = np.array([0.0, *itertools.accumulate(fixed)])
        self.kept = np.array([0.0, *itertools.accumulate(kept)])
        self.reserved = reserved
        runs = self.seconds[None, :] - self.seconds[:, None]
        self._runs = np.where(np.tri(len(runs), dtype=bool), math.inf, runs)
        self._at: dict[float, Floats] = {}

    def runs(self, speed: float) -> Floats:
        """[start, end]: the seconds of a microbatch in a run of layers at a speed; infinite of
        none."""
        if speed not in self._at:
            self._at[speed] = self._runs / speed
        return self._at[speed]

    def stored(self, start: int, end: int, in_flight: int) -> float:
        """Return the bytes of a run of layers, with so many microbatches in flight."""
        kept = self.kept[end] - self.kept[start]
        return float(self.fixed[end] - self.fixed[start] + in_flight * kept) + self.reserved

    def first_that_fit(self, in_flight: int, memory: float) -> Integers:
        """The first layer with which a run up to each end does not store more."""
        ends = np.arange(len(self.sums))
        if math.isinf(memory):
            return np.zeros_like(ends)
        memory -= self.reserved
        stored = self.fixed + in_flight * self.kept
        starts = np.minimum(np.searchsorted(stored, stored - memory), ends)

        def too_large(start: Integers) -> NDArray[np.bool_]:
            kept = self.kept[ends] - self.kept[start]
            sums: NDArray[np.bool_] = (
                self.fixed[ends] - self.fixed[start] + in_flight * kept > memory
            )
            return sums

        before = np.maximum(starts - 1, 0)
        starts = np.where(too_large(before), starts, before)
        found: Integers = np.where(too_large(starts), np.minimum(starts + 1, ends), starts)
        return found

    def windows(self, speed: float, first: Integers, most: Floats) -> Integers:
        """[T, end]: the first layer with which a run up to `end` fits and takes no longer."""
        until = self.seconds[None, :] - most[:, None] * speed
        starts = np.searchsorted(self.seconds, until.ravel()).reshape(until.shape)
        ends = np.arange(len(self.sums))
        for step in (-1, 1):
            tried = np.clip(starts - (step < 0), 0, ends)
            longer = (self.seconds[ends] - self.seconds[tried]) / speed > most[:, None]
            starts = np.where(longer if step > 0 else ~longer, tried + (step > 0), starts)
        return np.minimum(np.maximum(starts, first), ends)


class PipeDpTable:
    """Table of the seconds and bytes of runs of layers in each stage.

    Args:
        ways: in which a stage may run its layers.
        sent: of each layer, as that of `pipe_dp.ChainLayer`.
        speeds, bandwidths, memory: of each stage, as those of `pipe_dp.StageDevice`.
        in_flight: of each stage, the most microbatches that it keeps.
    """

    def __init__(
        self,
        ways: Sequence[LayerWay],
        sent: Sequence[float],
        speeds: Sequence[float],
        bandwidths: Sequence[float],
        memory: Sequence[float],
        in_flight: Sequence[int],
    ) -> None:
        self._ways, self._sent = ways, np.array([0.0, *sent])
        self._speeds, self._bandwidths, self._in_flight = speeds, bandwidths, in_flight
        self._layers = len(sent)
        # Of each stage and way, the first layer with which a run up to each layer fits.
        cases = [*zip(in_flight, memory, strict=True)]
        known = {case: [way.first_that_fit(*case) for way in ways] for case in set(cases)}
        self._first = [known[case] for case in cases]

    def seconds(self, stage: int, start: int, end: int, way: int = 0) -> float:
        """Return the seconds of a microbatch in the layers from `start` to `end`, which is left
        out."""
        sums = self._ways[way].sums
        return (sums[end] - sums[start]) / self._speeds[stage]

    def sent_seconds(self, stage: int, end: int) -> float:
        """Return the seconds of a microbatch from a stage that ends before layer `end` to the next,
        if any."""
        if stage == len(self._speeds) - 1:
            return 0.0
        return float(self._sent[end]) / self._bandwidths[stage]

    def stored(self, stage: int, start: int, end: int) -> float:
        """Return the bytes of these layers in the way that stores least."""
        in_flight = self._in_flight[stage]
        return min(way.stored(start, end, in_flight) for way in self._ways)

    def best(self, microbatches: int) -> LayerCut | None:
        """Return the cut that takes least and fits; None if none fits."""
        more = microbatches - 1

        def step(cut: LayerCut) -> float:
            return pipeline_seconds(microbatches, cut.slowest, cut.total)

        slowest = self._narrowest()
        if math.isinf(slowest):
            return None
        longest = max(way.sums[-1] for way in self._ways)
        ends = np.array([slowest, longest / min(self._speeds)])
        best, totals = self._within(ends, microbatches)
        known = step(best)
        candidates = np.empty(0)
        if more and totals[0] > totals[1] * (1 + SLACK):
            candidates = self._between(slowest, (known - totals[1]) / more)
        while len(candidates):
            at = np.unique(np.linspace(0, len(candidates) - 1, TOGETHER).astype(int))
            cut, totals = self._within(candidates[at], microbatches)
            best = min(best, cut, key=step)
            known = step(best)
            left = []
            for (one, other), total in zip(itertools.pairwise(at), totals[1:], strict=True):
                inside = candidates[one + 1 : other]
                left.append(inside[pipeline_seconds(microbatches, inside, total) < known])
            candidates = np.concatenate(left) if left else candidates[:0]
        return best

    # --- the slowest stage

    def _narrowest(self) -> float:
        """T_min; infinite if no cut fits."""
        count = self._layers + 1
        starts = np.arange(count)[:, None]
        least = np.full(count, math.inf)
        least[0] = 0.0
        for firsts, speed in zip(self._first, self._speeds, strict=True):
            own = np.full((count, count), math.inf)
            for way, first in zip(self._ways, firsts, strict=True):
                runs = way.runs(speed)
                if first.any():
                    runs = np.where(starts >= first[None, :], runs, math.inf)
                own = np.minimum(own, runs)
            least = np.maximum(least[:, None], own).min(axis=0)
        return float(least[-1])

    def _between(self, low: float, high: float) -> Floats:
        """Return the distinct seconds of runs of layers in any stage, above `low` and up to `high`,
        in order."""
        each = [way.runs(speed) for way in self._ways for speed in {*self._speeds}]
        found = [runs[(runs > low) & (runs <= high)] for runs in each]
        return np.unique(np.concatenate(found))

    # --- the sum of all stages

    def _within(self, limits: Floats, microbatches: int) -> tuple[LayerCut, Floats]:
        """total(T) of several T, and of these the cut of a step that takes least."""
        windows: dict[tuple[float, int], Integers] = {}
        for speed, firsts in zip(self._speeds, self._first, strict=True):
            for way, first in zip(self._ways, firsts, strict=True):
                if (speed, id(first)) not in windows:
                    windows[speed, id(first)] = way.windows(speed, first, limits)
        least = np.full((len(limits), self._layers + 1), math.inf)
        least[:, 0] = 0.0
        tables = []
        for stage, speed in enumerate(self._speeds):
            of_ways = []
            before, least = least, np.full_like(least, math.inf)
            for way, first in zip(self._ways, self._first[stage], strict=True):
                own = way.seconds / speed
                starts = windows[speed, id(first)]
                of_ways.append((starts, before - own))
                least = np.minimum(least, _least_of(of_ways[-1][1], starts) + own)
            tables.append(of_ways)
            if stage < len(self._speeds) - 1:
                least[:, 1:] += self._sent[1:] / self._bandwidths[stage]
        at = int(np.argmin(pipeline_seconds(microbatches, limits, least[:, -1])))
        return self._cut(at, tables, float(least[at, -1])), least[:, -1]

    def _cut(self, at: int, tables: list[list[tuple[Integers, Floats]]], total: float) -> LayerCut:
        """That of one T, from the last stage back."""
        counts, ways, slowest, end = [], [], 0.0, self._layers
        for stage in reversed(range(len(tables))):
            found = []
            for number, (starts, values) in enumerate(tables[stage]):
                first = int(starts[at, end])
                if first < end:
                    # Of equal ones fewer layers in late stages: they have the fewest microbatches
                    # in flight while those wait for what is sent.
                    start = end - 1 - int(np.argmin(values[at, first:end][::-1]))
                    own = self._ways[number].sums[end] / self._speeds[stage]
                    found.append((values[at, start] + own, number, start))
            _, way, start = min(found)
            counts.append(end - start)
            ways.append(way)
            slowest = max(slowest, self.seconds(stage, start, end, way))
            end = start
        return LayerCut(tuple(reversed(counts)), tuple(reversed(ways)), slowest, total)


def _least_of(values: Floats, starts: Integers) -> Floats:
    """[T, end]: the least of the values from `starts` to `end`, which is left out; infinite of
    none."""
    ends = np.arange(values.shape[1])
    lengths = ends - starts
    longest = int(lengths.max())
    if longest < 1:
        return np.full(values.shape, math.inf)
    # table[i]: of each entry the least of 2**i from it on.
    table, width = [values], 1
    while 2 * width <= longest:
        last = table[-1]
        wider = last.copy()
        np.minimum(last[:, :-width], last[:, width:], out=wider[:, :-width])
        table.append(wider)
        width *= 2
    rows = np.arange(len(values))[:, None]
    levels = np.maximum(np.frexp(lengths.astype(np.float64))[1] - 1, 0)
    stacked = np.stack(table)
    found = np.minimum(
        stacked[levels, rows, starts], stacked[levels, rows, np.maximum(ends - (1 << levels), 0)]
    )
    return np.where(lengths > 0, found, math.inf)
