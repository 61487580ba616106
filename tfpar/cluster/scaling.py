"""Clusters that differ from their description: links for another plan to win, measured figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from tfpar.cluster import check
from tfpar.cluster.description import Cluster, Device, Level, MeasuredCollective, Node
from tfpar.cluster.parts import ClusterParts, find_outermost_links, type_of
from tfpar.spec import Mesh


class LinkSlowdown(NamedTuple):
    """Time of what goes over links, as a multiple of what was described.

    Attributes:
        start: until it is on its way.
        byte: for each byte.
    """

    start: float = 1.0
    byte: float = 1.0


AS_DESCRIBED = LinkSlowdown()


def scale_times(
    cluster: Cluster,
    *,
    work: float = 1.0,
    within: LinkSlowdown = AS_DESCRIBED,
    between: LinkSlowdown = AS_DESCRIBED,
    parts: Mapping[str, float] | None = None,
) -> Cluster:
    """Slow the cluster down: all takes so many times as long as described.

    What was measured of collectives is changed as the links that their groups use.

    Args:
        work: what devices compute, and what starts a step.
        within, between: what goes over links within nodes, and over those between them.
        parts: in place of these, for the types of devices and links that have these names
            (`cluster.parts`).
    """
    parts = parts or {}
    named = ClusterParts.of(cluster) if parts else ClusterParts({}, {}, {})

    def pace_of(level: Level, is_within: bool) -> LinkSlowdown:
        name = (named.within if is_within else named.between).get(type_of(level))
        factor = None if name is None else parts.get(name)
        if factor is not None:
            return LinkSlowdown(factor, factor)
        return within if is_within else between

    def node_of(node: Node) -> Node:
        name = named.devices.get(node.device)
        uplink = node.uplink
        if uplink is not None:
            outside = pace_of(cluster.levels[-1], False) if cluster.levels else between
            uplink /= outside.byte
        return dataclasses.replace(
            node,
            device=_slower_device(node.device, work if name is None else parts.get(name, work)),
            levels=tuple(_slower_level(level, pace_of(level, True)) for level in node.levels),
            uplink=uplink,
        )

    def measured_of(one: MeasuredCollective) -> MeasuredCollective:
        is_within = not spans_nodes(cluster, one.mesh, one.axis)
        pace = within if is_within else between
        if parts:
            links = find_outermost_links(cluster, one.mesh, one.axis)
            pace = pace if links is None else pace_of(links, is_within)
        return dataclasses.replace(
            one, startup_s=one.startup_s * pace.start, bandwidth=one.bandwidth / pace.byte
        )

    return dataclasses.replace(
        cluster,
        nodes=tuple(map(node_of, cluster.nodes)),
        levels=tuple(_slower_level(level, pace_of(level, False)) for level in cluster.levels),
        measured=tuple(map(measured_of, cluster.measured)),
        step_s=cluster.step_s * work,
    )


@dataclasses.dataclass(frozen=True)
class Correction:
    """Correction of a cluster by measured steps: how many times as long as described things take.

    Attributes:
        work: what devices compute, and what starts a step (α of auto3d's eq. 3).
        within, between: what goes over links within nodes, and over those between them (β of
            eq. 1).
        parts: in place of these, for types of devices and of links, by name (`cluster.parts`);
            those that are listed were told apart.
    """

    work: float = 1.0
    within: float = 1.0
    between: float = 1.0
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check.settle(self, check.CORRECTION)

    def __hash__(self) -> int:
        return hash((self.work, self.within, self.between, *sorted(self.parts.items())))

    def apply(self, cluster: Cluster) -> Cluster:
        """Return the cluster with its figures corrected."""
        within, between = (LinkSlowdown(one, one) for one in (self.within, self.between))
        return scale_times(
            cluster, work=self.work, within=within, between=between, parts=self.parts
        )


def scale_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    """Give the cluster's links so many times the bandwidth, within and between nodes.

    Latencies stay.
    """
    pace = LinkSlowdown(byte=1 / factor)
    return scale_times(cluster, within=pace, between=pace)


def spans_nodes(cluster: Cluster, shape: tuple[int, ...], axis: int) -> bool:
    """Whether groups of ranks along an axis of a mesh of this shape have ranks in several nodes."""
    machines = dataclasses.replace(cluster, ranks=None).machines
    groups = Mesh.of(shape).groups((axis,))
    return any(len({machines[rank] for rank in group}) > 1 for group in groups)


def _slower_level(level: Level, pace: LinkSlowdown) -> Level:
    p2p = None if level.p2p is None else level.p2p / pace.byte
    latency_s = level.latency_s * pace.start
    return dataclasses.replace(
        level, bandwidth=level.bandwidth / pace.byte, latency_s=latency_s, p2p=p2p
    )


def _slower_device(device: Device, factor: float) -> Device:
    functions = device.functions_per_s
    return dataclasses.replace(
        device,
        flops={dtype: rate / factor for dtype, rate in device.flops.items()},
        memory_bandwidth=device.memory_bandwidth / factor,
        launch_s=device.launch_s * factor,
        functions_per_s=None if functions is None else functions / factor,
        dispatch_s=device.dispatch_s * factor,
        xla_dispatch_s=device.xla_dispatch_s * factor,
        ramp_s=device.ramp_s * factor,
        entries_per_s={name: rate / factor for name, rate in device.entries_per_s.items()},
    )
