"""Links of a cluster as groups of ranks see them when all of them communicate at once.

A group has ranks in some members of some levels. What it sends between them passes the members'
links, which the groups side by side share: eq. 3 of ATP (§3.4-3.5), for any groups on any
hierarchy, regular or not. Where few members are joined directly, their links to each other count
and not what each has in all (the paper's correction by the point-to-point matrix).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tfpar.cluster.check import TRANSFER
from tfpar.cluster.description import Cluster, Level, MeasuredCollective, Node
from tfpar.spec import Mesh

Groups = Sequence[Sequence[int]]
"""Groups of ranks that communicate at the same time."""


@dataclasses.dataclass(frozen=True)
class Link:
    """Link as one rank sees it: bytes/s each way, and seconds a message takes to start."""

    bandwidth: float
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Hop:
    """Level that a group crosses.

    Attributes:
        members: in how many of the level's members the group has ranks.
        bandwidth: bytes/s each way between one of these and the others, of this group's share.
        latency_s: seconds a message takes to start.
    """

    members: int
    bandwidth: float
    latency_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class _Depth:
    """The places at one depth of the hierarchy where ranks are joined.

    Attributes:
        levels: of each place.
        home: of each rank, its place and the member of that place that it is in; None for a
            rank whose node has no such depth.
        uplinks: bytes/s of each (place, member).
    """

    levels: list[Level]
    home: list[tuple[int, int] | None]
    uplinks: dict[tuple[int, int], float]


@functools.lru_cache(maxsize=256)
def _depths(cluster: Cluster) -> list[_Depth]:
    """The hierarchy, from outside in."""
    nodes = [node for node in cluster.nodes for _ in range(node.count)]
    depths = []
    in_a_place = len(nodes)
    for at, level in enumerate(cluster.levels):
        in_a_member = in_a_place // level.count
        depth = _Depth([level] * (len(nodes) // in_a_place), [], {})
        for i, node in enumerate(nodes):
            home = i // in_a_place, i % in_a_place // in_a_member
            depth.home.extend([home] * node.size)
            own = node.uplink if at == len(cluster.levels) - 1 else None
            depth.uplinks[home] = own or level.bandwidth
        depths.append(depth)
        in_a_place = in_a_member
    for at in range(max((len(node.levels) for node in nodes), default=0)):
        depths.append(_inside(nodes, at))
    return depths


def _inside(nodes: Sequence[Node], at: int) -> _Depth:
    """The depth of the nodes' levels number `at`."""
    depth = _Depth([], [], {})
    for node in nodes:
        if at >= len(node.levels):
            depth.home.extend([None] * node.size)
            continue
        level = node.levels[at]
        in_a_member = math.prod(inner.count for inner in node.levels[at + 1 :])
        for rank in range(node.size):
            place, member = divmod(rank // in_a_member, level.count)
            home = len(depth.levels) + place, member
            depth.home.append(home)
            depth.uplinks[home] = level.bandwidth
        depth.levels.extend([level] * (node.size // (in_a_member * level.count)))
    return depth


def groups_of(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """List the groups along mesh axes `axes`: of a part of a cluster, as they lie in the whole."""
    return tuple(map(cluster.places, mesh.groups(axes)))


@functools.lru_cache(maxsize=8192)
def route(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...]) -> tuple[Hop, ...]:
    """List the levels that the groups along mesh axes `axes` cross, from inside out.

    All groups communicate at once, each around a ring that enters and leaves a member once. The
    slowest group counts at each level, as all are waited for.
    """
    groups = groups_of(cluster, mesh, axes)
    crossed = (_hop(depth, groups, False) for depth in reversed(_depths(cluster)))
    return tuple(hop for hop in crossed if hop is not None)


@functools.lru_cache(maxsize=8192)
def link_of(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...], pairwise: bool = False) -> Link:
    """Find the slowest link that the groups along mesh axes `axes` use, all at once.

    Args:
        pairwise: each rank sends to all others (an all-to-all) and not along a ring: then the
            ranks of a group in a member divide its link too.
    """
    groups = groups_of(cluster, mesh, axes)
    return _slowest(_hop(depth, groups, pairwise) for depth in _depths(cluster))


@functools.lru_cache(maxsize=8192)
def transfer_link(cluster: Cluster, pairs: tuple[tuple[int, int], ...]) -> Link:
    """Find the slowest link that transfers from rank to rank use, all at once.

    A transfer leaves one member of a level and enters another; their links carry both ways at the
    same time. Those that leave a member share its link, and so do those that enter it; those
    between the same two members share what joins these.

    Args:
        pairs: (sender, receiver) of each; who sends to itself uses no link.
    """
    placed = [cluster.places(pair) for pair in pairs]
    found = _slowest(hop for depth in _depths(cluster) for hop in _transfers(depth, placed))
    starts = [transfer_start(cluster, *pair) for pair in placed if pair[0] != pair[1]]
    known = [seconds for seconds in starts if seconds is not None]
    latency_s = max(known) if known and len(known) == len(starts) else found.latency_s
    return Link(found.bandwidth, latency_s)


@functools.lru_cache(maxsize=65536)
def transfer_start(cluster: Cluster, sender: int, receiver: int) -> float | None:
    """Look up the measured seconds in which a transfer between two ranks of the whole starts, those
    of the smallest groups that have both; None if none such was measured."""
    found: list[tuple[int, float]] = []
    for entry in cluster.measured:
        if entry.kind == TRANSFER:
            for group in Mesh.of(entry.mesh).groups((entry.axis,)):
                if sender in group and receiver in group:
                    found.append((len(group), entry.startup_s))
    return min(found)[1] if found else None


class LinkSharing(NamedTuple):
    """Link that transfers share which cross it at the same time.

    Attributes:
        name: tells it from others of the cluster.
        bandwidth: bytes/s of all of them together.
    """

    name: tuple[Any, ...]
    bandwidth: float


@functools.lru_cache(maxsize=65536)
def path_between(
    cluster: Cluster, sender: int, receiver: int
) -> tuple[tuple[LinkSharing, ...], float]:
    """Find the links that a transfer from rank to rank crosses, and the seconds that it takes to
    start.

    As `transfer_link` counts them: the link of the member that it leaves, that of the member that
    it enters, each for one direction, and what joins the two; of a bus, that.
    """
    found: list[LinkSharing] = []
    latency_s = 0.0
    one, other = cluster.places((sender, receiver))
    for at, depth in enumerate(_depths(cluster)):
        leaves, enters = depth.home[one], depth.home[other]
        if not leaves or not enters or leaves[0] != enters[0] or leaves == enters:
            continue
        place = leaves[0]
        level = depth.levels[place]
        if level.topology == "bus":
            found.append(LinkSharing(("bus", at, place), level.bandwidth))
        else:
            found.append(LinkSharing(("from", at, *leaves), depth.uplinks[leaves]))
            found.append(LinkSharing(("to", at, *enters), depth.uplinks[enters]))
        found.append(LinkSharing(("between", at, *leaves, *enters), level.pair_bandwidth))
        latency_s = max(latency_s, level.latency_s)
    start_s = transfer_start(cluster, one, other) if one != other else None
    return tuple(found), latency_s if start_s is None else start_s


def likeness(cluster: Cluster) -> Hashable:
    """Make the key that plans on a cluster, or on a part of one, cost by: equal where ranks have
    equal devices, and links that join them alike."""
    places = cluster.places(range(cluster.size))
    depths = []
    for depth in _depths(cluster):
        numbers: dict[Hashable, int] = {}
        joined: list[Hashable] = []
        for place in places:
            home = depth.home[place]
            if home is None:
                joined.append(None)
                continue
            numbered = [numbers.setdefault(of, len(numbers)) for of in (home[0], home)]
            joined.append((*numbered, depth.levels[home[0]], depth.uplinks[home]))
        depths.append(tuple(joined))
    return cluster.devices, tuple(depths)


@functools.lru_cache(maxsize=1024)
def ring_links(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...]) -> tuple[float, ...]:
    """List B_i of auto3d's eq. 1: bytes/s between neighbours on the ring of the slowest group.

    The rings of all groups pass the members' links at the same time and share them.
    """
    groups = groups_of(cluster, mesh, axes)
    depths = [(depth, _loads(depth, groups, False)) for depth in _depths(cluster)]

    def bandwidth(one: int, other: int) -> float:
        found = math.inf
        for depth, load in depths:
            home, met = depth.home[one], depth.home[other]
            if home is None or met is None or home[0] != met[0] or home == met:
                continue
            level = depth.levels[home[0]]
            joined = level.pair_bandwidth
            if level.topology == "bus":  # which two that send to each other share
                joined = min(joined, level.bandwidth) / 2
            links = (depth.uplinks[home] / load[home], depth.uplinks[met] / load[met])
            found = min(found, joined, *links)
        return found

    rings = [
        tuple(bandwidth(a, b) for a, b in zip(group, [*group[1:], group[0]], strict=True))
        for group in groups
    ]
    return max(rings, key=lambda links: sum(1.0 / b for b in links))


def _slowest(hops: Iterable[Hop | None]) -> Link:
    crossed = [hop for hop in hops if hop is not None]
    return Link(
        min((hop.bandwidth for hop in crossed), default=math.inf),
        max((hop.latency_s for hop in crossed), default=0.0),
    )


def _hop(depth: _Depth, groups: Groups, pairwise: bool) -> Hop | None:
    """Find the crossing of this depth by the slowest of the groups; None if none crosses it."""
    loads = _loads(depth, groups, pairwise)
    if not loads:
        return None
    in_all: dict[int, float] = {}  # place -> loads of all its members: what a bus carries
    for (place, _), load in loads.items():
        in_all[place] = in_all.get(place, 0.0) + load
    members, bandwidth, latency = 1, math.inf, 0.0
    for group in groups:
        for place, homes in _crossed(depth, group).items():
            level = depth.levels[place]
            reach = (len(homes) - 1) * level.pair_bandwidth
            if level.topology == "bus":
                share = min(level.bandwidth, reach) / in_all[place]
            else:
                share = min(min(depth.uplinks[h], reach) / loads[h] for h in homes)
            members = max(members, len(homes))
            bandwidth = min(bandwidth, share)
            latency = max(latency, level.latency_s)
    return Hop(members, bandwidth, latency)


def _transfers(depth: _Depth, pairs: Groups) -> Iterator[Hop]:
    """List the crossings of this depth by the pairs that do."""
    homes = [(depth.home[source], depth.home[target]) for source, target in pairs]
    crossing = [
        (one, other)
        for one, other in homes
        if one and other and one[0] == other[0] and one != other
    ]
    leaving = collections.Counter(one for one, _ in crossing)
    entering = collections.Counter(other for _, other in crossing)
    between = collections.Counter(crossing)
    inside = collections.Counter(place for (place, _), _ in crossing)
    for one, other in crossing:
        place, _ = one
        level = depth.levels[place]
        if level.topology == "bus":
            share = level.bandwidth / inside[place]
        else:
            links = depth.uplinks
            share = min(links[one] / leaving[one], links[other] / entering[other])
        joined = level.pair_bandwidth / between[one, other]
        yield Hop(2, min(share, joined), level.latency_s)


def _loads(depth: _Depth, groups: Groups, pairwise: bool) -> dict[tuple[int, int], float]:
    """Count how many times over the link of each (place, member) is used."""
    loads: dict[tuple[int, int], float] = {}
    for group in groups:
        size = len(group)
        for homes in _crossed(depth, group).values():
            for home, members in homes.items():
                # Of what a rank sends to the size - 1 others, size - members leave its member.
                uses = members * (size - members) / (size - 1) if pairwise else 1.0
                loads[home] = loads.get(home, 0.0) + uses
    return loads


def _crossed(depth: _Depth, group: Sequence[int]) -> dict[int, dict[tuple[int, int], int]]:
    """By place where the group is in several members: how many ranks it has in each."""
    found: dict[int, dict[tuple[int, int], int]] = {}
    for rank in group:
        home = depth.home[rank]
        if home is not None:
            homes = found.setdefault(home[0], {})
            homes[home] = homes.get(home, 0) + 1
    return {place: homes for place, homes in found.items() if len(homes) > 1}


@functools.lru_cache(maxsize=8192)
def find_measurement(
    cluster: Cluster, kind: str, mesh: Mesh, axes: tuple[int, ...]
) -> MeasuredCollective | None:
    """Look up what calibration found for a collective on the very groups along mesh axes `axes`; or
    for groups of which they are some, if these were measured on links of their own."""
    groups = groups_of(cluster, mesh, axes)
    entries = [entry for entry in cluster.measured if entry.kind == kind]
    for entry in entries:
        if not entry.group and Mesh.of(entry.mesh).groups((entry.axis,)) == groups:
            return entry
    whole = dataclasses.replace(cluster, ranks=None)
    known: dict[tuple[int, ...], MeasuredCollective] = {}
    for entry in entries:
        beside = Mesh.of(entry.mesh).groups((entry.axis,))
        if _apart(whole, beside):
            known |= {entry.group: entry} if entry.group else {g: entry for g in beside}
    if not all(group in known for group in groups):
        return None
    found = [known[group] for group in groups]
    return dataclasses.replace(
        found[0],
        startup_s=max(entry.startup_s for entry in found),
        bandwidth=min(entry.bandwidth for entry in found),
    )


def _apart(cluster: Cluster, groups: Groups) -> bool:
    """Whether no machine has ranks of two of these groups, which would share its link."""
    machines = [{cluster.machines[rank] for rank in group} for group in groups]
    return sum(map(len, machines)) == len(set().union(*machines))
