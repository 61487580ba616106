"""A small network by dynamic programming: one node after another is merged into a table.

Merging a node puts, in place of all tables that it is in, one over the nodes that these tables
have besides: the least that they come to with the node's best choice. This is what `cones` does
with chains, for nodes of any number of neighbours. Tables grow with the number of nodes in them:
good for the segments of a graph, which are narrow, and refused beyond `LARGEST`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfpar.search.rhino.network import Moves, Network

LARGEST = 2**18
"""Entries of a table beyond which the integer program is faster."""


class TooLarge(Exception):
    """A table would have more than `LARGEST` entries."""


Table = tuple[tuple[int, ...], np.ndarray]
"""Nodes, ascending, and what each combination of their choices costs."""


def best_for_each(network: Network, node: int) -> list[tuple[float, tuple[int, ...]]]:
    """For each choice of `node` the least that the network costs with it, and the picks.

    Late work counts as nothing.

    Raises:
        TooLarge: see the module.
    """
    sizes = [n.size for n in network.nodes]
    tables: list[Table] = [((i,), n.seconds) for i, n in enumerate(network.nodes)]
    tables += [_table(moves, sizes) for moves in network.moves]
    merged: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    left = set(range(len(sizes))) - {node}
    while left:
        beside = {i: set().union(*(t[0] for t in tables if i in t[0])) - {i} for i in left}
        least = min(left, key=lambda i: math.prod(sizes[n] for n in beside[i]))
        nodes = tuple(sorted(beside[least]))
        total = _sum([t for t in tables if least in t[0]], (*nodes, least), sizes)
        tables = [t for t in tables if least not in t[0]]
        tables.append((nodes, total.min(axis=-1)))
        merged.append((least, nodes, total.argmin(axis=-1)))
        left.discard(least)
    totals = _sum(tables, (node,), sizes)
    return [(float(totals[k]), _picks(merged, node, k, len(sizes))) for k in range(sizes[node])]


def _picks(merged: Sequence, node: int, choice: int, count: int) -> tuple[int, ...]:
    picks = [-1] * count
    picks[node] = choice
    for at, nodes, best in reversed(merged):
        picks[at] = int(best[tuple(picks[n] for n in nodes)])
    return tuple(picks)


def _sum(tables: Sequence[Table], nodes: tuple[int, ...], sizes: Sequence[int]) -> np.ndarray:
    """The sum of `tables` as one over `nodes`, in this order."""
    shape = [sizes[n] for n in nodes]
    if math.prod(shape) > LARGEST:
        raise TooLarge
    total = np.zeros(shape)
    place = {n: at for at, n in enumerate(nodes)}
    for own, table in tables:
        order = sorted(range(len(own)), key=lambda i: place[own[i]])
        there = {place[own[i]] for i in order}
        full = [shape[at] if at in there else 1 for at in range(len(nodes))]
        total += table.transpose(order).reshape(full)
    return total


def _table(moves: Moves, sizes: Sequence[int]) -> Table:
    """What a tensor costs, by the choices of its source and all its readers."""
    nodes = tuple(sorted(moves.nodes()))
    shape = [sizes[n] for n in nodes]
    if math.prod(shape) > LARGEST:
        raise TooLarge

    def along(node: int, states: np.ndarray) -> np.ndarray:
        full = [1] * len(nodes)
        full[nodes.index(node)] = len(states)
        return states.reshape(full)

    made = along(moves.source, moves.made)
    total = np.zeros(shape)
    for q in sorted({int(q) for _, needs in moves.readers for q in needs}):
        wanted = np.zeros([1] * len(nodes), dtype=bool)
        for node, needs in moves.readers:
            wanted = wanted | along(node, needs == q)
        total += np.where(wanted, moves.seconds[:, q][made], 0.0)
    return nodes, total
