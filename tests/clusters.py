"""Clusters of two levels, in few words."""

from __future__ import annotations

import dataclasses

from tfpar.cluster.description import Cluster, Device, Level
from tfpar.cluster.network import Link


def device(
    flops: float, half_flops: float, memory_bytes: float, memory_bandwidth: float, launch_s: float
) -> Device:
    """A device with rates in float32 and float16."""
    rates = {"float32": flops, "float16": half_flops}
    return Device(rates, memory_bytes, memory_bandwidth, launch_s)


def two_levels(
    name: str,
    nodes: int,
    per_node: int,
    device: Device,
    intra: Link,
    inter: Link,
    overlap: float = 1.0,
) -> Cluster:
    """Nodes behind a switch, and their devices behind one each."""
    levels = [
        Level(count, link.bandwidth, link.latency_s)
        for count, link in ((nodes, inter), (per_node, intra))
    ]
    return Cluster.regular(name, device, levels, overlap=overlap)


def joined_by(cluster: Cluster, inter: Link) -> Cluster:
    """`cluster` with another link between its nodes."""
    (level,) = cluster.levels
    level = dataclasses.replace(level, bandwidth=inter.bandwidth, latency_s=inter.latency_s)
    return dataclasses.replace(cluster, levels=(level,))
