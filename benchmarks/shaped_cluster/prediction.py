"""What a plan's collectives send over the links between nodes: no clocks, no network.

Counted are payloads, as tfpar and Horovod move them over Gloo: rings for all-reduces and gathers,
blocks straight to their owners for reduce-scatters, a tree for broadcasts. Ranks of one node talk
over its loopback, so only what goes to another node counts, for the node that sends it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from tfpar.spec import Mesh, TfparError

Message = tuple[int, int, float]
"""Sender and receiver, as indices into the group, and the part of the payload."""


def wire_bytes(
    collectives: Iterable[tuple[str, Sequence[str], int]], mesh: Mesh, ranks_per_node: int
) -> list[float]:
    """Bytes that each node sends to others in a step.

    Two ranks of two nodes each, a ring of all four: each node has one neighbour elsewhere.

        >>> wire_bytes([("all_reduce", ("data",), 1000)], Mesh.of([4]), 2)
        [1500.0, 1500.0]

    Args:
        collectives: (kind, mesh axes, payload bytes), as `PartitionedGraph.collectives` has them.
        ranks_per_node: rank `r` is on node `r // ranks_per_node`.

    Raises:
        TfparError: a collective that is not known here.
    """
    sent = [0.0] * math.ceil(mesh.size / ranks_per_node)
    for kind, axes, num_bytes in collectives:
        for group in mesh.groups(tuple(mesh.axis(name) for name in axes)):
            for source, target, part in _messages(kind, len(group)):
                home, other = group[source] // ranks_per_node, group[target] // ranks_per_node
                if home != other:
                    sent[home] += part * num_bytes
    return sent


def _messages(kind: str, size: int) -> Iterator[Message]:
    """The messages of a collective among `size` ranks; one round or all rounds together."""
    ranks = range(size)
    if size == 1:
        return
    if kind in ("all_reduce", "all_gather"):
        rounds = (2 if kind == "all_reduce" else 1) * (size - 1)
        yield from ((rank, (rank + 1) % size, rounds / size) for rank in ranks)
    elif kind in ("all_to_all", "reduce_scatter"):
        yield from ((a, b, 1 / size) for a in ranks for b in ranks if a != b)
    elif kind == "broadcast":
        # In round i the first 2^i ranks, which have it, send to the next as many.
        yield from ((rank ^ 1 << (rank.bit_length() - 1), rank, 1.0) for rank in ranks[1:])
    else:
        raise TfparError(f"How {kind!r} travels between nodes is not known.")
