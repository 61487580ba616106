"""Exact minimum of the traffic between stages for units in a chain, by dynamic programming.

Stages are runs of units then. A stage of the units from `start` to `end` receives the same whatever
the other stages are:

    received(start, end) = flows from before `start` that one of its units reads
                           + tied weights that one of its units reads

So the least is found by a program over (units placed, stages used). Of cuts that send as little it
gives the one whose slowest stage takes least. Where each unit reads of the one before it, whatever
it reads besides, there is no other order, and nothing sends less.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfpar.planning.inter_op.stages.bounds import SLACK, Bounds
from tfpar.planning.inter_op.stages.memory_budget import MemoryBudget
from tfpar.planning.inter_op.stages.order_partition import Stages
from tfpar.planning.inter_op.stages.slowdowns import Paces
from tfpar.planning.inter_op.stages.units import UnitGraph

Floats = NDArray[np.float64]


def is_chain(graph: UnitGraph, rooms: MemoryBudget | None = None) -> bool:
    """Whether units have one order only, each reading of the one before it, and no devices run
    several stages that have little room: what each stage may hold is known by itself then."""
    if rooms is not None and len({*rooms.actors}) < len(rooms.actors):
        return False
    edges = set(graph.edges)
    return all(pair in edges for pair in itertools.pairwise(range(len(graph.units))))


def minimize_chain_traffic(
    graph: UnitGraph,
    bounds: Bounds,
    most_seconds: float,
    paces: Paces,
    rooms: MemoryBudget | None = None,
    least_seconds: float = 0.0,
) -> Stages | None:
    """Find the runs of units that send least; None if there are none.

    Args:
        bounds: of each unit, the stages in which it can be.
        most_seconds: that a stage may take.
        paces: one for each stage.
        rooms: what the devices of stages can hold, each stage by itself; None: everything.
        least_seconds: that a stage is to take.
    """
    count, seconds = len(graph.units), [unit.seconds for unit in graph.units]
    runs = _Runs.of(seconds, most_seconds / min(paces))
    work, received = runs.sum(seconds), runs.of_pairs(_received(graph))
    sent, slowest = np.full(count + 1, np.inf), np.full(count + 1, np.inf)
    sent[0] = slowest[0] = 0.0
    begins = []
    for stage, pace in enumerate(paces):
        taken = work * pace
        allowed = runs.exist & (taken <= most_seconds) & (taken >= least_seconds)
        allowed &= runs.sum([not first <= stage <= last for first, last in bounds]) == 0
        if rooms is not None:
            held = runs.sum([rooms.of_unit(unit, stage) for unit in graph.units])
            allowed &= held <= rooms.limit(stage)
        total = np.where(allowed, sent[runs.starts] + received, np.inf)
        least = total.min(axis=1)
        longest = np.maximum(slowest[runs.starts], taken)
        longest = np.where(np.isfinite(total) & (total == least[:, None]), longest, np.inf)
        begins.append(longest.argmin(axis=1))
        sent, slowest = least, longest.min(axis=1)
    if np.isinf(sent[count]):
        return None
    stages, end = [0] * count, count
    for stage in reversed(range(len(paces))):
        start = int(runs.starts[end, begins[stage][end]])
        stages[start:end] = [stage] * (end - start)
        end = start
    return tuple(stages)


class _Runs(NamedTuple):
    """The runs of units that are short enough for a stage, by their end and, ascending, by where
    they start: few of all in a deep model.

    Attributes:
        starts: [end, number]: where a run starts.
        exist: whether there is such a run.
    """

    starts: NDArray[np.intp]
    exist: NDArray[np.bool_]

    @classmethod
    def of(cls, seconds: Sequence[float], most_seconds: float) -> _Runs:
        """Return the runs of units of these seconds that take so long at most, or a bit longer."""
        before = np.concatenate([[0.0], np.cumsum(seconds)])
        ends = np.arange(len(before))
        first = np.searchsorted(before, before - most_seconds * (1 + SLACK))
        width = max(1, int((ends - first).max()))
        starts = ends[:, None] - np.arange(width, 0, -1)[None, :]
        return cls(np.maximum(starts, 0), starts >= 0)

    def sum(self, values: Sequence[float]) -> Floats:
        """[end, number]: the sum of the values of the units of a run."""
        sums = np.concatenate([[0.0], np.cumsum(values)])
        found: Floats = sums[:, None] - sums[self.starts]
        return found

    def of_pairs(self, values: Floats) -> Floats:
        """[end, number]: the values by start and end, of runs."""
        found: Floats = values[self.starts, np.arange(len(self.starts))[:, None]]
        return found


def _received(graph: UnitGraph) -> Floats:
    """[start, end]: bytes that units from one to the other, which is left out, receive."""
    found = np.zeros((len(graph.units) + 1,) * 2)
    flows = [(flow.source, flow.readers, flow.num_bytes) for flow in graph.flows]
    ties = [(-1, tie.readers, tie.num_bytes) for tie in graph.ties]
    for source, readers, num_bytes in (*flows, *ties):
        # Runs that begin behind one reader, and no later than the next, have that as their first.
        for before, reader in itertools.pairwise([source, *sorted({*readers})]):
            found[before + 1 : reader + 1, reader + 1] += num_bytes
    received: Floats = found.cumsum(axis=1)
    return received
