"""Parts of a cluster whose figures may be wrong apart: types of devices and of links.

Devices that are described alike are one type, and so are links with the same figures, whatever the
number of members that they join. A type whose name does not tell it from all others is called by
its number.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping

from tfpar.cluster.description import Cluster, Device, Level
from tfpar.spec import Mesh


@dataclasses.dataclass(frozen=True)
class ClusterParts:
    """Types of devices and links of a cluster, with names that tell them apart.

    Attributes:
        devices: in the order of their ranks.
        within, between: of links in nodes and between them, from outside in.
    """

    devices: Mapping[Device, str]
    within: Mapping[Level, str]
    between: Mapping[Level, str]

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterParts:
        """Name the parts of a cluster, of the whole where it is a part of one."""
        levels = [level for node in cluster.nodes for level in node.levels]
        devices = {node.device: node.device.name for node in cluster.nodes}
        within = {type_of(level): level.name for level in levels}
        between = {type_of(level): level.name for level in cluster.levels}
        count = collections.Counter([*devices.values(), *within.values(), *between.values()])

        def names(sort: str, given: Iterable[str]) -> list[str]:
            each = enumerate(given)
            return [name if name and count[name] == 1 else f"{sort} {i}" for i, name in each]

        return cls(
            dict(zip(devices, names("device", devices.values()), strict=True)),
            dict(zip(within, names("links within nodes", within.values()), strict=True)),
            dict(zip(between, names("links between nodes", between.values()), strict=True)),
        )


def type_of(level: Level) -> Level:
    """Return what links of the same figures have in common, however many members they join."""
    return dataclasses.replace(level, count=1)


def find_outermost_links(cluster: Cluster, shape: tuple[int, ...], axis: int) -> Level | None:
    """Find the outermost links that groups of ranks along an axis of a mesh of this shape use; None
    if each group is one device."""
    paths = list(_paths(cluster))
    outermost: tuple[int, Level] | None = None
    for group in Mesh.of(shape).groups((axis,)):
        for depth, members in enumerate(zip(*(paths[rank] for rank in group), strict=False)):
            if len({place for place, _ in members}) > 1:
                if outermost is None or depth < outermost[0]:
                    outermost = depth, members[0][1]
                break
    return None if outermost is None else outermost[1]


def _paths(cluster: Cluster) -> Iterator[list[tuple[int, Level]]]:
    """Of each device of the whole its place at each level, from outside in, and the level."""
    node_places = itertools.product(*(range(level.count) for level in cluster.levels))
    for node in (kind for kind in cluster.nodes for _ in range(kind.count)):
        outside = [*zip(next(node_places), cluster.levels, strict=True)]
        for inside in itertools.product(*(range(level.count) for level in node.levels)):
            yield [*outside, *zip(inside, node.levels, strict=True)]
