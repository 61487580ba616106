"""Clusters by name: presets, fitted to a mesh, files, and the CPUs of this machine."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from tfpar.cluster.description import Cluster, Device, Level
from tfpar.cluster.files import cluster_of, read_cluster
from tfpar.spec import Mesh, TfparError
from tfpar.spec.arguments import path

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


_MADE: Mapping[str, Callable[[int, int], Cluster]] = {"cpu": cpu, "cpu-processes": cpu_processes}


def preset_names() -> list[str]:
    """List the presets, sorted."""
    files = importlib.resources.files("tfpar.cluster.presets").iterdir()
    found = [f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")]
    return sorted([*found, *_MADE])


def find_cluster(
    value: Cluster | Mapping[str, Any] | str | os.PathLike[str], mesh: Mesh | None = None
) -> Cluster:
    """Find a cluster: from itself, a mapping of a file's keys, a preset's name or a file.

    Args:
        mesh: says how many nodes of a preset, and how many devices of each: the first axis
            counts nodes where there are several axes. Without it a preset is as it is written.

    Raises:
        TfparError: unknown name, unreadable file, wrong keys, or a node of the preset has fewer
            devices than the mesh asks for.
    """
    if isinstance(value, Cluster):
        return value
    if isinstance(value, Mapping):
        return cluster_of(value)
    value = path("cluster", value, "a Cluster, the name of a preset, or the path of a cluster file")
    if value in _MADE:
        return _MADE[value](*grid(mesh) or (1, 1))
    if value in preset_names():
        preset = read_preset(value)
        return preset if mesh is None else fit_to_mesh(preset, mesh)
    if os.path.exists(value):
        return read_cluster(value)
    raise TfparError(
        f"There is no cluster {value!r}: neither a file nor one of "
        f"{', '.join(map(repr, preset_names()))}."
    )


@functools.cache
def read_preset(name: str) -> Cluster:
    """Read a preset as its file has it."""
    folder = importlib.resources.files("tfpar.cluster.presets")
    with importlib.resources.as_file(folder / f"{name}.toml") as file:
        return dataclasses.replace(read_cluster(file), name=name)


def grid(mesh: Mesh | None) -> tuple[int, int] | None:
    """Find (nodes, devices of each) that a mesh such as `split([2, 8])` stands for."""
    if mesh is None:
        return None
    if mesh.num_axes == 1:
        return 1, mesh.size
    return mesh.shape[0], mesh.size // mesh.shape[0]


def fit_to_mesh(preset: Cluster, mesh: Mesh) -> Cluster:
    """Take as many of a preset's nodes, and of the devices in each, as `mesh` has.

    Clusters with several kinds of nodes are taken as they are.

    Raises:
        TfparError: a node has fewer devices, or they cannot be shared out over its levels.
    """
    if len(preset.nodes) > 1:
        return preset
    (node,) = preset.nodes
    if mesh.num_axes == 1:
        each = min(mesh.size, node.size)
        nodes = math.ceil(mesh.size / each)
    else:
        nodes, each = grid(mesh) or (1, 1)
    if each > node.size:
        raise TfparError(
            f"The mesh {mesh} asks for {nodes} nodes of {each} devices, but a node of "
            f"{preset.name!r} has {node.size}. Use at most {node.size} in a node, or describe "
            f"another cluster."
        )
    levels = preset.levels
    if math.prod(level.count for level in levels) != nodes:
        if nodes > 1 and not levels:
            raise TfparError(
                f"The mesh {mesh} asks for {nodes} nodes, but {preset.name!r} is a single machine "
                f"without links to others. Describe a cluster with a [[level]] between nodes."
            )
        levels = _innermost(levels, nodes, preset.name)
    inside = node.levels if each == node.size else _innermost(node.levels, each, preset.name)
    # What was measured on more devices says nothing of these.
    measured = tuple(m for m in preset.measured if math.prod(m.mesh) <= nodes * each)
    return dataclasses.replace(
        preset,
        nodes=(dataclasses.replace(node, levels=inside, count=nodes),),
        levels=levels,
        measured=measured,
    )


def _innermost(levels: tuple[Level, ...], size: int, name: str) -> tuple[Level, ...]:
    """Find what joins `size` members: whole inner levels, and a part or a larger one outside."""
    found: list[Level] = []
    for at, level in reversed(list(enumerate(levels))):
        if size == 1:
            break
        count = math.gcd(size, level.count) if size > level.count else size
        if at == 0:  # the outermost grows with the cluster
            count = size
        elif count not in (level.count, size):
            raise TfparError(
                f"{size} devices of cluster {name!r} do not fill its {level.name or 'inner'} "
                f"groups of {level.count}. Use a multiple of {level.count}."
            )
        found.insert(0, dataclasses.replace(level, count=count))
        size //= count
    return tuple(found)
