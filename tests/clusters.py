"""Clusters of two levels, in few words."""

from __future__ import annotations

import dataclasses
import math

from tfpar.cluster import Cluster, Device, Level, Link


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


def slow_cores(ranks: int, processes: bool = False) -> Cluster:
    """Ranks that share two cores, in one process or each in its own: slow ones, for which more is
    to be gained by splitting work than on today's."""
    flops, bandwidth = 60e9 / ranks, 16e9 / ranks
    memory_bytes = 16e9 / (1 if processes else ranks)
    link = Link(1e9, 0.8e-3 * max(1.0, ranks / 2)) if processes else Link(3e9, 20e-6)
    one = Device({"float32": flops}, memory_bytes, bandwidth, 10e-6, host_bandwidth=math.inf)
    return two_levels("slow cores", 1, ranks, one, link, link, overlap=0.0)
