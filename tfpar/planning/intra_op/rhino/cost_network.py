"""Cost function network: the decisions of a search, and their costs.

Nodes are decided, each for one of its choices. What they cost together is

    C(x) = sum_i seconds_i[x_i]  +  sum_t moves_t(x)  +  max(0, L(x)),      L(x) likewise of `late`

where `moves_t` is what a tensor t costs on its way from the op that makes it to those that read it:
the sum of `seconds_t[p, q]` over the *different* states q that its readers need, p being the
state that its maker leaves it in (a tensor is moved once for all that need the same state). L is
work that can hide: what only the update waits for, less the backward pass that hides it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class DecisionNode:
    """Something to decide.

    Attributes:
        seconds: of each choice; infinite for one that is barred.
        late: seconds of each choice that can hide (see the module), negative for what hides them.
    """

    name: str
    seconds: np.ndarray
    late: np.ndarray

    @property
    def size(self) -> int:
        return len(self.seconds)


@dataclasses.dataclass(frozen=True, eq=False)
class ReshardCosts:
    """A tensor on its way to its readers.

    Attributes:
        source: the node that makes it.
        made: the state in which each choice of the source leaves it.
        readers: (node, the state that each of its choices needs), each pair once.
        seconds, late: from each state it can be left in (rows) to each that can be needed.
    """

    source: int
    made: np.ndarray
    readers: tuple[tuple[int, np.ndarray], ...]
    seconds: np.ndarray
    late: np.ndarray

    def nodes(self) -> set[int]:
        return {self.source, *(node for node, _ in self.readers)}

    def cost(self, picks: Sequence[int]) -> tuple[float, float]:
        """(seconds, late seconds) with these choices; a node that is undecided (-1) needs
        nothing."""
        if picks[self.source] < 0:
            return 0.0, 0.0
        left = self.made[picks[self.source]]
        needed = {int(needs[picks[n]]) for n, needs in self.readers if picks[n] >= 0}
        return (
            sum(float(self.seconds[left, q]) for q in needed),
            sum(float(self.late[left, q]) for q in needed),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class CostNetwork:
    """See the module."""

    nodes: Sequence[DecisionNode]
    moves: Sequence[ReshardCosts]

    def seconds_and_late(self, picks: Sequence[int]) -> tuple[float, float]:
        """(seconds, late seconds) of the choices `picks`."""
        seconds = sum(float(n.seconds[p]) for n, p in zip(self.nodes, picks, strict=True) if p >= 0)
        late = sum(float(n.late[p]) for n, p in zip(self.nodes, picks, strict=True) if p >= 0)
        for moves in self.moves:
            more, later = moves.cost(picks)
            seconds, late = seconds + more, late + later
        return seconds, late

    def cost(self, picks: Sequence[int]) -> float:
        """C(x), in seconds."""
        seconds, late = self.seconds_and_late(picks)
        return seconds + max(0.0, late)


def join(networks: Sequence[CostNetwork]) -> CostNetwork:
    """Return the network of the nodes of all: late work of one hides behind what hides that of
    others."""
    nodes: list[DecisionNode] = []
    moves: list[ReshardCosts] = []
    for network in networks:
        first = len(nodes)
        nodes += network.nodes
        moves += (
            dataclasses.replace(
                one,
                source=first + one.source,
                readers=tuple((first + node, needs) for node, needs in one.readers),
            )
            for one in network.moves
        )
    return CostNetwork(nodes, moves)
