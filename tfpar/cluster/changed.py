"""A cluster as it is not: what it would have to be for another plan to win."""

from __future__ import annotations

import dataclasses

from tfpar.cluster.description import Cluster, Level


def with_links(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with links of so many times the bandwidth, within and between nodes.

    Latencies stay. What was measured of collectives is changed as what links let expect is.
    """

    def faster(level: Level) -> Level:
        p2p = None if level.p2p is None else level.p2p * factor
        return dataclasses.replace(level, bandwidth=level.bandwidth * factor, p2p=p2p)

    nodes = tuple(
        dataclasses.replace(
            node,
            levels=tuple(map(faster, node.levels)),
            uplink=None if node.uplink is None else node.uplink * factor,
        )
        for node in cluster.nodes
    )
    measured = tuple(
        dataclasses.replace(one, bandwidth=one.bandwidth * factor) for one in cluster.measured
    )
    levels = tuple(map(faster, cluster.levels))
    return dataclasses.replace(cluster, nodes=nodes, levels=levels, measured=measured)
