"""Ranks on the CPUs of this machine, as clusters."""

from __future__ import annotations

import math
import os

from tfpar.cluster.description import Cluster, Device, Level

CORE_FLOPS = 100e9
"""FLOP/s of one core in `float32`: 200e9 were measured with AVX-512; AVX2 is half as wide."""

CORE_BANDWIDTH = 24e9
MACHINE_BANDWIDTH = 200e9
"""Bytes/s between memory and one core, and all of them together: 24e9 to 57e9 were measured for one
of two cores; the other is that of some eight channels."""

CORE_FUNCTIONS = 1.5e9
"""Exponentials a second of one core (measured)."""


def cpu(nodes: int, per_node: int) -> Cluster:
    """Make ranks that share this machine's cores and memory, as virtual CPU devices do.

    A collective is a copy or a sum in their memory, which starts as ops do.
    """
    device = _device(nodes * per_node)
    return _cluster("cpu", nodes, per_node, device, CORE_BANDWIDTH, 5e-6)


def cpu_processes(nodes: int, per_node: int) -> Cluster:
    """Make CPU ranks that are processes, some of them on one machine.

    Those talk through its loopback at 1 GB/s, machines through Ethernet of 10 Gbit/s. A round takes
    0.8 ms, most of it waiting for Horovod's next cycle (measured with Gloo on 2 cores), and more
    where ranks have to wait for a core.
    """
    latency_s = 0.8e-3 * max(1.0, per_node / _cores())
    return _cluster("cpu-processes", nodes, per_node, _device(per_node), 1e9, latency_s)


def _device(ranks: int) -> Device:
    """The share of each of so many ranks in this machine; an op of TensorFlow costs 2 us."""
    cores = _cores()
    share = cores / ranks
    return Device(
        {"float32": CORE_FLOPS * share},
        host_memory() / ranks,
        min(CORE_BANDWIDTH * cores, MACHINE_BANDWIDTH) / ranks,
        2e-6,
        name="CPU",
        functions_per_s=CORE_FUNCTIONS * share,
        host_bandwidth=math.inf,
    )


def _cores() -> int:
    return os.cpu_count() or 1


def _cluster(
    name: str, nodes: int, per_node: int, device: Device, bandwidth: float, latency_s: float
) -> Cluster:
    levels = [Level(n, bandwidth, latency_s) for n in (nodes, per_node)]
    return Cluster.regular(name, device, levels, overlap=0.0)


def host_memory() -> float:
    """Read the bytes of this machine's memory; 16 GB if it does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return 16e9
