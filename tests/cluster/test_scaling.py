"""A cluster with other links."""

from __future__ import annotations

import dataclasses

from tfpar.cluster.description import Cluster, Device, Level, MeasuredCollective, Node
from tfpar.cluster.scaling import Correction, scale_bandwidth

DEVICE = Device({"float32": 1e9}, 1e9, 1e9)


def cluster(factor: float) -> Cluster:
    node = Node(DEVICE, (Level(4, 8e9 * factor, 1e-6, "direct", 2e9 * factor),), 2, 1e9 * factor)
    measured = (MeasuredCollective("all_reduce", (8,), 0, 1e-4, 5e8 * factor),)
    return Cluster("two", (node,), (Level(2, 4e9 * factor, 2e-6),), measured=measured)


def test_all_bandwidths_change_and_nothing_else():
    assert scale_bandwidth(cluster(1.0), 4.0) == cluster(4.0)
    part = cluster(1.0).part([0, 5])
    assert scale_bandwidth(part, 0.5) == dataclasses.replace(cluster(0.5), ranks=part.ranks)


def test_types_of_devices_and_links_are_corrected_apart():
    """By their names, or by number where these do not tell them apart."""
    slow = dataclasses.replace(DEVICE, flops={"float32": 1e8}, name="slow")
    inside, outside = Level(2, 8e9, 1e-6, name="wire"), Level(2, 4e9, 2e-6)
    nodes = Node(DEVICE, (inside,), 2, uplink=1e9), Node(slow, (inside,), 2)
    along = [MeasuredCollective("all_reduce", (2, 2, 2), axis, 1e-4, 1e8) for axis in range(3)]
    levels = dataclasses.replace(outside, bandwidth=1e9), outside
    described = Cluster("four", nodes, levels, measured=tuple(along), step_s=1.0)
    parts = {"slow": 2.0, "device 0": 5.0, "wire": 3.0, "links between nodes 0": 4.0}
    found = Correction(work=7.0, between=10.0, parts=parts).apply(described)
    assert [d.flops["float32"] for d in found.devices] == [2e8] * 4 + [5e7] * 4
    assert [level.bandwidth for level in found.levels] == [1e9 / 4, 4e8]
    assert [node.levels[0].bandwidth for node in found.nodes] == [8e9 / 3] * 2
    assert found.nodes[0].uplink == 1e8 and found.step_s == 7.0
    # Along the first axis groups cross all links between nodes, along the last those within.
    assert [round(one.startup_s * 1e4) for one in found.measured] == [4, 10, 3]
