"""Ranks on the CPUs of this machine, as clusters."""

from __future__ import annotations

import math
import os

from tfpar.cluster.description import Cluster, Device, Level


def cpu(nodes: int, per_node: int) -> Cluster:
    """Ranks that share this machine's cores and memory, as virtual CPU devices do.

    30 GFLOP/s a core, 8 GB/s of memory traffic a core (empirical, common servers); an op of
    TensorFlow costs some 10 us.
    """
    ranks = nodes * per_node
    share = (os.cpu_count() or 1) / ranks
    return _cluster("cpu", nodes, per_node, _device(share, host_memory() / ranks), 3e9, 20e-6)


def cpu_processes(nodes: int, per_node: int) -> Cluster:
    """CPU ranks that are processes, some of them on one machine.

    Those talk through its loopback at 1 GB/s, machines through Ethernet of 10 Gbit/s. A round takes
    0.8 ms, most of it waiting for Horovod's next cycle (measured with Gloo on 2 cores), and more
    where ranks have to wait for a core.
    """
    share = (os.cpu_count() or 1) / per_node
    device = _device(share, host_memory() / per_node)
    return _cluster("cpu-processes", nodes, per_node, device, 1e9, 0.8e-3 * max(1.0, 1.0 / share))


def _device(share: float, memory_bytes: float) -> Device:
    rates = {"float32": 30e9 * share}
    return Device(rates, memory_bytes, 8e9 * share, 10e-6, name="CPU", host_bandwidth=math.inf)


def _cluster(
    name: str, nodes: int, per_node: int, device: Device, bandwidth: float, latency_s: float
) -> Cluster:
    levels = [Level(n, bandwidth, latency_s) for n in (nodes, per_node)]
    return Cluster.regular(name, device, levels, overlap=0.0)


def host_memory() -> float:
    """Bytes of this machine's memory; 16 GB if it does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return 16e9
