"""A small network by dynamic programming: one node after another is merged into a table.

Merging a node puts, in place of all tables that it is in, one over the nodes that these tables
have besides: the least that they come to with the node's best choice. This is what `cones` does
with chains, for nodes of any number of neighbours. Tables grow with the number of nodes in them:
good for the segments of a graph, which are narrow, and refused beyond `MAX_ENTRIES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfpar.planning.intra_op.rhino.cost_network import CostNetwork, ReshardCosts

MAX_ENTRIES = 2**18
"""Entries of a table beyond which the integer program is faster."""


class TooLarge(Exception):
    """A table would have more than `MAX_ENTRIES` entries."""


Table = tuple[tuple[int, ...], np.ndarray]
"""Nodes, ascending, and what each combination of their choices costs."""

_Merged = tuple[int, tuple[int, ...], np.ndarray]
"""A node that was merged, its neighbours, and its best choice for each combination of theirs."""


def solve_by_elimination(network: CostNetwork, node: int) -> list[tuple[float, tuple[int, ...]]]:
    """Find for each choice of `node` the least that the network costs with it, and the picks.

    Late work counts as nothing.

    Raises:
        TooLarge: see the module.
    """
    sizes = [n.size for n in network.nodes]
    of: list[list[Table]] = [[((i,), n.seconds)] for i, n in enumerate(network.nodes)]
    for moves in network.moves:
        _share(_table(moves, sizes), of)
    merged: list[_Merged] = []
    alone = 0.0
    beside = {i: _beside(i, of) for i in range(len(sizes)) if i != node}
    entries = {i: math.prod(sizes[n] for n in others) for i, others in beside.items()}
    while entries:
        least = min(entries, key=lambda i: entries[i])
        del entries[least]
        nodes = beside[least]
        total = _sum(of[least], (*nodes, least), sizes)
        merged.append((least, nodes, total.argmin(axis=-1)))
        for n in nodes:
            of[n] = [table for table in of[n] if least not in table[0]]
        _share((nodes, total.min(axis=-1)), of)
        if not nodes:
            alone += float(total.min())
        for n in nodes:
            if n != node:
                beside[n] = _beside(n, of)
                entries[n] = math.prod(sizes[other] for other in beside[n])
    totals = alone + _sum(of[node], (node,), sizes)
    return [(float(totals[k]), _picks(merged, node, k, len(sizes))) for k in range(sizes[node])]


def _share(table: Table, of: Sequence[list[Table]]) -> None:
    """Put `table` among those of each of its nodes."""
    for node in table[0]:
        of[node].append(table)


def _beside(node: int, of: Sequence[Sequence[Table]]) -> tuple[int, ...]:
    """The nodes that stand with `node` in some table, ascending."""
    return tuple(sorted({n for nodes, _ in of[node] for n in nodes} - {node}))


def _picks(merged: Sequence[_Merged], node: int, choice: int, count: int) -> tuple[int, ...]:
    picks = [-1] * count
    picks[node] = choice
    for at, nodes, best in reversed(merged):
        picks[at] = int(best[tuple(picks[n] for n in nodes)])
    return tuple(picks)


def _sum(tables: Sequence[Table], nodes: tuple[int, ...], sizes: Sequence[int]) -> np.ndarray:
    """The sum of `tables` as one over `nodes`, in this order."""
    shape = [sizes[n] for n in nodes]
    if math.prod(shape) > MAX_ENTRIES:
        raise TooLarge
    total = np.zeros(shape)
    place = {n: at for at, n in enumerate(nodes)}
    for own, table in tables:
        order = sorted(range(len(own)), key=lambda i: place[own[i]])
        there = {place[own[i]] for i in order}
        full = [shape[at] if at in there else 1 for at in range(len(nodes))]
        total += table.transpose(order).reshape(full)
    return total


def _table(moves: ReshardCosts, sizes: Sequence[int]) -> Table:
    """Tabulate the costs of a tensor, by the choices of its source and all its readers."""
    nodes = tuple(sorted(moves.nodes()))
    shape = [sizes[n] for n in nodes]
    if math.prod(shape) > MAX_ENTRIES:
        raise TooLarge

    def along(node: int, states: np.ndarray) -> np.ndarray:
        full = [1] * len(nodes)
        full[nodes.index(node)] = len(states)
        return states.reshape(full)

    first, needs = moves.readers[0]
    if len(moves.readers) == 1 and first != moves.source:  # most are so: nothing is shared
        paid = moves.seconds[np.ix_(moves.made, needs)]
        return nodes, paid if moves.source < first else paid.T
    made = along(moves.source, moves.made)
    total = np.zeros(shape)
    for q in sorted({int(q) for _, needs in moves.readers for q in needs}):
        wanted = np.zeros([1] * len(nodes), dtype=bool)
        for node, needs in moves.readers:
            wanted = wanted | along(node, needs == q)
        total += np.where(wanted, moves.seconds[:, q][made], 0.0)
    return nodes, total
