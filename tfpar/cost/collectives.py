"""Time of collectives and transfers on a cluster: latency and bandwidth (alpha-beta).

N ranks, a payload of M bytes, links of B bytes/s that take alpha to start (Thakur, Rabenseifner
and Gropp, cited by ATP §3.5). A transfer takes alpha + M / B, an all-reduce, by its algorithm,

    ring         2 (N - 1) alpha + 2 (N - 1) / N * M / B
    tree         2 log2(N) alpha + 2 M / B                      pipelined
    halving      2 log2(N) alpha + 2 (N - 1) / N * M / B        Rabenseifner's: eq. 4 of ATP
    hierarchical that of each level, one after another: its members' ranks work side by side
    heterogeneous-ring   2 (N - 1) alpha + 2 M / N * sum(1 / B_i)        eq. 1 of auto3d

where B is that of the slowest link passed, shared with the groups that communicate at the same
time (`cluster.network`). Gathers and reduce-scatters take half of it. A library takes the
fastest that it knows for a size; what was measured on the very group goes before all of this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping

from tfpar.cluster.description import Cluster
from tfpar.cluster.network import (
    Hop,
    Link,
    find_measurement,
    link_of,
    ring_links,
    route,
    transfer_link,
)
from tfpar.spec import Mesh
from tfpar.spec.names import PERMUTE

# How often the payload is passed on.
_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}

PACKED_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
"""The collectives that are packed (`compile.local.packing`)."""

_MANY = 2.0**40

Line = tuple[float, float]
"""(seconds to start, seconds a byte of payload)."""


@functools.lru_cache(maxsize=65536)
def collective_seconds(
    kind: str, axes: tuple[int, ...], num_bytes: float, mesh: Mesh, cluster: Cluster
) -> float:
    """Price a collective over mesh axes `axes`, in seconds.

    Args:
        kind: one of `spec.names.GROUP_OPERATIONS`.
        num_bytes: the payload on one rank, in bytes, as `reshard.step_bytes` counts it.
    """
    if mesh.group_size(axes) == 1:
        return 0.0
    return min(start + num_bytes * per_byte for start, per_byte in lines(kind, axes, mesh, cluster))


def seconds_per_byte(kind: str, axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> float:
    """Price a byte of a collective so large that its start is nothing."""
    return collective_seconds(kind, axes, _MANY, mesh, cluster) / _MANY


def least_seconds_per_byte(kind: str, axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> float:
    """Bound the price of a byte of a collective from below, whatever is sent with it."""
    if mesh.group_size(axes) == 1:
        return 0.0
    return min(per_byte for _, per_byte in lines(kind, axes, mesh, cluster))


def least_startup_seconds(kind: str, axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> float:
    """Bound the start of a collective from below, whatever is sent."""
    if mesh.group_size(axes) == 1:
        return 0.0
    return min(start for start, _ in lines(kind, axes, mesh, cluster))


@functools.lru_cache(maxsize=65536)
def lines(kind: str, axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> tuple[Line, ...]:
    """Give the cost line of each algorithm that the cluster's library has for the collective."""
    known = find_measurement(cluster, kind, mesh, axes)
    if known is not None:
        return ((known.startup_s, 1.0 / known.bandwidth),)
    if kind == "all_to_all":
        return (_all_to_all(axes, mesh, cluster),)
    if kind == "broadcast":
        return (_tree(axes, mesh, cluster),)
    if kind == PERMUTE:
        return (_neighbours(axes, mesh, cluster),)
    passes = _PASSES[kind]
    found = (_ALGORITHMS[name](axes, mesh, cluster) for name in cluster.algorithms)
    return tuple((passes * start, passes * per_byte) for start, per_byte in found)


def transfer_seconds(pairs: Iterable[tuple[int, int]], num_bytes: float, cluster: Cluster) -> float:
    """Price several transfers that begin together: seconds until all of them are done.

    A transfer takes alpha + M / B, on the links of the levels that its ends are apart; those that
    pass a link share it (as in eq. 3 of ATP, for what goes one way).

    Args:
        pairs: (sender, receiver) of each; who sends to itself does so at once.
        num_bytes: what each sends.
    """
    link = _link_of_pairs(pairs, cluster)
    return link.latency_s + num_bytes / link.bandwidth


def _link_of_pairs(pairs: Iterable[tuple[int, int]], cluster: Cluster) -> Link:
    return transfer_link(cluster, tuple(sorted((a, b) for a, b in pairs if a != b)))


def _neighbours(axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> Line:
    """Transfers in which each rank of a group sends to the one before it, all at once."""
    pairs = ((rank, group[at - 1]) for group in mesh.groups(axes) for at, rank in enumerate(group))
    link = _link_of_pairs(pairs, cluster)
    return link.latency_s, 1.0 / link.bandwidth


# --- one pass: a gather, or a reduce-scatter ---------------------------------------


def _ring(axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> Line:
    ranks, link = mesh.group_size(axes), link_of(cluster, mesh, axes)
    return (ranks - 1) * link.latency_s, (ranks - 1) / ranks / link.bandwidth


def _tree(axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> Line:
    """A pipelined tree, as of a broadcast."""
    return _rounds(axes, mesh, cluster), 1.0 / link_of(cluster, mesh, axes).bandwidth


def _halving(axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> Line:
    ranks, link = mesh.group_size(axes), link_of(cluster, mesh, axes)
    rounds = math.ceil(math.log2(ranks))
    return rounds * link.latency_s, (ranks - 1) / ranks / link.bandwidth


def _hierarchical(axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> Line:
    hops = route(cluster, mesh, axes)
    # All ranks within a member pass on their parts of the payload: together the whole of it.
    per_byte = sum((hop.members - 1) / hop.members / hop.bandwidth for hop in hops)
    return sum(map(_hop_rounds, hops)), per_byte


def _heterogeneous_ring(axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> Line:
    start, _ = _ring(axes, mesh, cluster)
    links = ring_links(cluster, mesh, axes)
    return start, sum(1.0 / bandwidth for bandwidth in links) / len(links)


_ALGORITHMS: Mapping[str, Callable[[tuple[int, ...], Mesh, Cluster], Line]] = {
    "ring": _ring,
    "tree": _tree,
    "halving": _halving,
    "hierarchical": _hierarchical,
    "heterogeneous-ring": _heterogeneous_ring,
}


def _hop_rounds(hop: Hop) -> float:
    return math.ceil(math.log2(hop.members)) * hop.latency_s


def _rounds(axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> float:
    """Seconds to reach all members of a group by a tree that spans level by level."""
    return sum(map(_hop_rounds, route(cluster, mesh, axes)))


# --- others -------------------------------------------------------------------------


def _all_to_all(axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> Line:
    """A message to each of the others; the ranks of a node share its link."""
    ranks, link = mesh.group_size(axes), link_of(cluster, mesh, axes, pairwise=True)
    return (ranks - 1) * link.latency_s, (ranks - 1) / ranks / link.bandwidth
