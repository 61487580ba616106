"""Contention domains: the parts of a cluster in which the rank groups of an actor share links.

On thousands of devices most of these parts are equal to others. Where machines are joined by one
level of links, a part of other machines of the same kinds takes as long, so each is brought to the
first machines of its kinds: what was found for one then holds for all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from tfpar.cluster.description import Cluster, Node


@functools.lru_cache(maxsize=64)
def contention_domains(
    cluster: Cluster, ranks: tuple[int, ...], actors: int
) -> tuple[Cluster, ...]:
    """Return for each actor its ranks, and those of the actors that share a machine with it: their
    groups share links.

    An actor within one machine has the links to itself, as those of a switch are.

    Args:
        ranks: those of each actor, one after the other.
    """
    size = len(ranks) // actors
    own = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    machines = [{cluster.machines[rank] for rank in stage} for stage in own]
    users: dict[int, list[int]] = {}
    for actor, used in enumerate(machines):
        for machine in used:
            users.setdefault(machine, []).append(actor)
    found = []
    for actor, used in enumerate(machines):
        near = {actor} if len(used) == 1 else {a for machine in used for a in users[machine]}
        beside = itertools.chain.from_iterable(own[a] for a in sorted(near))
        found.append(_part(cluster, _on_the_first_alike(cluster, tuple(beside))))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _part(cluster: Cluster, ranks: tuple[int, ...]) -> Cluster:
    return cluster.part(ranks)


def _on_the_first_alike(cluster: Cluster, ranks: Sequence[int]) -> tuple[int, ...]:
    """The same ranks of other machines, the first ones of the same kinds."""
    if cluster.ranks is not None or len(cluster.levels) > 1 or cluster.measured:
        return tuple(ranks)
    alike, starts = _machines(cluster)
    left: dict[int, Iterator[int]] = {}
    moved: dict[int, int] = {}
    found = []
    for rank in ranks:
        machine = cluster.machines[rank]
        if machine not in moved:
            others = alike[machine]
            moved[machine] = next(left.setdefault(others[0], iter(others)))
        found.append(starts[moved[machine]] + rank - starts[machine])
    return tuple(found)


@functools.lru_cache(maxsize=64)
def _machines(cluster: Cluster) -> tuple[list[list[int]], list[int]]:
    """Of each machine those that are like it, in order; and its first rank."""
    kinds: dict[Node, list[int]] = {}
    alike: list[list[int]] = []
    starts, start = [], 0
    for node in cluster.nodes:
        kind = dataclasses.replace(node, count=1)
        for _ in range(node.count):
            kinds.setdefault(kind, []).append(len(alike))
            alike.append(kinds[kind])
            starts.append(start)
            start += node.size
    return alike, starts
