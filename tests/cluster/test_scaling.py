"""A cluster with other links."""

from __future__ import annotations

import dataclasses

from tfpar.cluster.description import Cluster, Device, Level, MeasuredCollective, Node
from tfpar.cluster.scaling import scale_bandwidth

DEVICE = Device({"float32": 1e9}, 1e9, 1e9)


def cluster(factor: float) -> Cluster:
    node = Node(DEVICE, (Level(4, 8e9 * factor, 1e-6, "direct", 2e9 * factor),), 2, 1e9 * factor)
    measured = (MeasuredCollective("all_reduce", (8,), 0, 1e-4, 5e8 * factor),)
    return Cluster("two", (node,), (Level(2, 4e9 * factor, 2e-6),), measured=measured)


def test_all_bandwidths_change_and_nothing_else():
    assert scale_bandwidth(cluster(1.0), 4.0) == cluster(4.0)
    part = cluster(1.0).part([0, 5])
    assert scale_bandwidth(part, 0.5) == dataclasses.replace(cluster(0.5), ranks=part.ranks)
