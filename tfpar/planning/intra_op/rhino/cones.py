"""Cones, merged by dynamic programming (Rhino §4.3.2, the bottom of its three levels).

Most ops of a model stand in a chain: one tensor comes in, one op reads what comes out. Whatever
is chosen at the ends of a chain, what is best between them follows: `eliminate_chains` puts a table
of its costs in the chain's place, one entry for each pair of choices at its ends. What is left are
the cone roots, at which several tensors meet or part. A cone's other nodes are the chains into it.

§4.3.2 fixes a chain by the choice of its root alone. Here it is fixed by both ends, and only where
one choice is best for both totals that the cost of a network (`cost_network`) is the larger of:
without the late work, and with it. So nothing is lost: a solution of what is left, with the chains
filled in, is a solution of the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfpar.planning.intra_op.rhino.cost_network import CostNetwork, DecisionNode, ReshardCosts

_NEAR = 1e-12
"""Totals that differ by so much of themselves are equal."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Merged:
    """A node that is merged: its best choice by those of its neighbours."""

    node: int
    neighbours: tuple[int, ...]
    best: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ReducedNetwork:
    """A network without its chains.

    Attributes:
        network: of the roots.
        nodes: the number that each of its nodes has in the network that was merged.
    """

    network: CostNetwork
    nodes: Sequence[int]
    _merged: Sequence[_Merged]
    _size: int

    def all_picks(self, picks: Sequence[int]) -> list[int]:
        """Choices of all nodes of the network that was merged, from those of the roots."""
        found = [-1] * self._size
        for node, pick in zip(self.nodes, picks, strict=True):
            found[node] = pick
        for merged in reversed(self._merged):
            found[merged.node] = int(merged.best[tuple(found[n] for n in merged.neighbours)])
        return found


def eliminate_chains(network: CostNetwork) -> ReducedNetwork:
    """Eliminate the nodes of `network` that stand in chains."""
    return _Merging(network).run()


class _Merging:
    def __init__(self, network: CostNetwork) -> None:
        self.network = network
        self.seconds = [node.seconds.copy() for node in network.nodes]
        self.late = [node.late.copy() for node in network.nodes]
        # Tables between two nodes: [choices of one, choices of the other], (seconds, late).
        self.tables: dict[int, dict[int, tuple[np.ndarray, np.ndarray]]] = {
            i: {} for i in range(len(network.nodes))
        }
        self.shared: list[ReshardCosts] = []
        self.pinned: set[int] = set()
        for moves in network.moves:
            self._add(moves)

    def _add(self, moves: ReshardCosts) -> None:
        others = moves.nodes() - {moves.source}
        if len(moves.readers) > 1:
            self.shared.append(moves)
            self.pinned |= moves.nodes()
            return
        ((reader, needs),) = moves.readers
        if not others:
            self.seconds[reader] += moves.seconds[moves.made, needs]
            self.late[reader] += moves.late[moves.made, needs]
            return
        states = np.ix_(moves.made, needs)
        self._join(moves.source, reader, moves.seconds[states], moves.late[states])

    def _join(self, one: int, other: int, seconds: np.ndarray, late: np.ndarray) -> None:
        """Add a table between two nodes to what is there."""
        if other in self.tables[one]:
            before = self.tables[one][other]
            seconds, late = before[0] + seconds, before[1] + late
        self.tables[one][other] = seconds, late
        self.tables[other][one] = seconds.T, late.T

    def run(self) -> ReducedNetwork:
        merged: list[_Merged] = []
        waiting = [i for i in self.tables if i not in self.pinned]
        gone: set[int] = set()
        while waiting:
            node = waiting.pop()
            # One without neighbours is a root: what it costs, and hides, goes nowhere else.
            if node in gone or not 1 <= len(self.tables[node]) <= 2:
                continue
            neighbours = tuple(self.tables[node])
            found = self._merge(node, neighbours)
            if found is not None:
                merged.append(found)
                gone.add(node)
                waiting += [n for n in neighbours if n not in self.pinned]
        kept = [i for i in self.tables if i not in gone]
        return ReducedNetwork(self._left(kept), kept, merged, len(self.tables))

    def _merge(self, node: int, neighbours: tuple[int, ...]) -> _Merged | None:
        """Merge `node` into what lies between its neighbours, if one choice is always best."""
        seconds, late = self.seconds[node], self.late[node]
        for n in neighbours:  # each adds a dim before the node's own
            table = self.tables[n][node]
            seconds = table[0].reshape(-1, *(1,) * (seconds.ndim - 1), table[0].shape[1]) + seconds
            late = table[1].reshape(-1, *(1,) * (late.ndim - 1), table[1].shape[1]) + late
        whole = seconds + late
        best = np.argmin(seconds + whole, axis=-1)
        at = np.expand_dims(best, -1)
        for total in (seconds, whole):
            least, found = total.min(axis=-1), np.take_along_axis(total, at, -1)[..., 0]
            with np.errstate(invalid="ignore"):
                if not np.all((found <= least + _NEAR * np.abs(least)) | np.isinf(least)):
                    return None
        for n in neighbours:
            del self.tables[n][node]
        seconds = np.take_along_axis(seconds, at, -1)[..., 0]
        late = np.take_along_axis(late, at, -1)[..., 0]
        if len(neighbours) == 2:
            second, first = neighbours  # the last one stands in front
            self._join(first, second, seconds, late)
            neighbours = (first, second)
        elif neighbours:
            self.seconds[neighbours[0]] += seconds
            self.late[neighbours[0]] += late
        return _Merged(node, neighbours, best)

    def _left(self, kept: Sequence[int]) -> CostNetwork:
        place = {node: i for i, node in enumerate(kept)}
        nodes = [
            DecisionNode(self.network.nodes[i].name, self.seconds[i], self.late[i]) for i in kept
        ]
        moves = [
            ReshardCosts(
                place[m.source],
                m.made,
                tuple((place[n], needs) for n, needs in m.readers),
                m.seconds,
                m.late,
            )
            for m in self.shared
        ]
        for one in kept:
            for other, (seconds, late) in self.tables[one].items():
                if one < other:
                    rows, columns = map(np.arange, seconds.shape)
                    moves.append(
                        ReshardCosts(place[one], rows, ((place[other], columns),), seconds, late)
                    )
        return CostNetwork(nodes, moves)
