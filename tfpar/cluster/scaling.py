"""Clusters that differ from their description: links for another plan to win, measured figures."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from tfpar.cluster import check
from tfpar.cluster.description import Cluster, Device, Level, MeasuredCollective, Node
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
) -> Cluster:
    """Slow the cluster down: all takes so many times as long as described.

    What was measured of collectives is changed as the links that their groups use.

    Args:
        work: what devices compute, and what starts a step.
        within, between: what goes over links within nodes, and over those between them.
    """

    def node_of(node: Node) -> Node:
        return dataclasses.replace(
            node,
            device=_slower_device(node.device, work),
            levels=tuple(_slower_level(level, within) for level in node.levels),
            uplink=None if node.uplink is None else node.uplink / between.byte,
        )

    def measured_of(one: MeasuredCollective) -> MeasuredCollective:
        pace = between if spans_nodes(cluster, one.mesh, one.axis) else within
        return dataclasses.replace(
            one, startup_s=one.startup_s * pace.start, bandwidth=one.bandwidth / pace.byte
        )

    return dataclasses.replace(
        cluster,
        nodes=tuple(map(node_of, cluster.nodes)),
        levels=tuple(_slower_level(level, between) for level in cluster.levels),
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
    """

    work: float = 1.0
    within: float = 1.0
    between: float = 1.0

    def __post_init__(self) -> None:
        check.settle(self, check.CORRECTION)

    def apply(self, cluster: Cluster) -> Cluster:
        """Return the cluster with its figures corrected."""
        within, between = (LinkSlowdown(one, one) for one in (self.within, self.between))
        return scale_times(cluster, work=self.work, within=within, between=between)


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
        ramp_s=device.ramp_s * factor,
        entries_per_s={name: rate / factor for name, rate in device.entries_per_s.items()},
    )
