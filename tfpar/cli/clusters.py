"""`tfpar clusters`: the machines that plans can be made for by name, or one of them in detail."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

from tfpar.cluster import units
from tfpar.cluster.description import Cluster, Level, Node
from tfpar.cluster.lookup import find_cluster, preset_names
from tfpar.observability.report.budget import price_text
from tfpar.observability.report.tables import render_table

JSON_VERSION = 1
"""Of what `--json` prints: it is counted up where a key changes its meaning or goes."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command, its options, and `run` as what it does."""
    parser = commands.add_parser(
        "clusters",
        help="list the machines that --cluster knows by name, or show one of them",
        description="List the machines that --cluster knows by name; with a name, or the path of a "
        "cluster file, show the devices and links of that one.",
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a preset or a cluster file (default: list presets)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the clusters that the arguments ask for; returns the exit code.

    Raises:
        TfparError: there is no such cluster, or its file cannot be read.
    """
    names = preset_names() if options.name is None else [options.name]
    clusters = [find_cluster(name) for name in names]
    if options.json:
        print(as_json(clusters))
    elif options.name is None:
        print(_as_table(clusters))
    else:
        print(_in_detail(clusters[0]))
    return 0


def as_json(clusters: list[Cluster]) -> str:
    """`{"version": 1, "clusters": [...]}`: the fields of `Cluster` in bytes, seconds and FLOP/s,
    with `shape` and `num_devices`; null is what has no end, or is not said."""
    described = [
        {**dataclasses.asdict(c), "shape": c.shape_text(), "num_devices": c.num_devices}
        for c in clusters
    ]
    return json.dumps({"version": JSON_VERSION, "clusters": _finite(described)}, indent=2)


def _finite(value: Any) -> Any:
    """`value` without infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _as_table(clusters: list[Cluster]) -> str:
    rows = [(c.name, c.shape_text(), _devices(c), _links(c)) for c in clusters]
    table = render_table("Clusters", ("name", "shape", "devices", "links, outermost first"), rows)
    return (
        f"{table}\n\nA preset takes the shape of the mesh: more nodes, or fewer devices in each. "
        f"`tfpar clusters NAME` shows one."
    )


def _devices(cluster: Cluster) -> str:
    """`16 A100-SXM4-80GB`, kind by kind."""
    return ", ".join(
        f"{node.count * node.size} {node.device.name or 'unnamed'}" for node in cluster.nodes
    )


def _links(cluster: Cluster) -> str:
    """The bandwidths of its levels, those in its kinds of nodes last: `180 GB/s, 240 GB/s`."""
    inside = (", ".join(_rate(level.bandwidth) for level in node.levels) for node in cluster.nodes)
    in_nodes = " or ".join(dict.fromkeys(filter(None, inside)))
    between = [_rate(level.bandwidth) for level in cluster.levels]
    return ", ".join(filter(None, [*between, in_nodes]))


def _rate(bandwidth: float) -> str:
    return _about(bandwidth, "bytes/s")


def _about(value: float, measure: str) -> str:
    """`value` to three digits, with its unit."""
    return str(units.write(float(f"{value:.3g}"), measure))


def _in_detail(cluster: Cluster) -> str:
    """Format a cluster's devices and links, each as a table."""
    devices_text = f"{cluster.num_devices} device{'s' if cluster.num_devices > 1 else ''}"
    head = f"Cluster {cluster.name!r}: {devices_text}, {cluster.shape_text()}"
    devices = [
        (
            node.device.name or "unnamed",
            f"{node.count} x {node.size}",
            _about(node.device.memory_bytes, "bytes"),
            _rate(node.device.memory_bandwidth),
            ", ".join(f"{t} {_about(r, 'FLOP/s')}" for t, r in node.device.flops.items()),
            _rate(node.device.host_bandwidth),
        )
        for node in cluster.nodes
    ]
    columns = "device", "nodes x devices", "memory", "its bandwidth", "products", "to the host"
    links = render_table(
        "Links", ("where", "joins", "topology", "bandwidth", "latency"), _rows(cluster)
    )
    parts = [head, render_table("Devices", columns, devices), links]
    library = f"Collectives: {', '.join(cluster.algorithms)}"
    parts.append(f"{library}; {cluster.overlap:.0%} of a device's arithmetic goes on beside them.")
    hosts = [_host_memory(node) for node in cluster.nodes]
    parts.append(f"Memory of a host: {', '.join(hosts)}.")
    if any(node.device.price_per_hour is not None for node in cluster.nodes):
        rents = [price_text(node.device) for node in cluster.nodes]
        parts.append(f"Rent of a device: {'; '.join(rents)}.")
    if cluster.measured:
        parts.append(
            f"{len(cluster.measured)} measured collectives go before what links let expect."
        )
    return "\n\n".join(parts)


def _host_memory(node: Node) -> str:
    """`2 TB`."""
    size = node.host_memory_bytes
    return "not known" if size is None else _about(size, "bytes")


def _rows(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    for level in cluster.levels:
        yield ("between nodes", *_level(level))
    for node in cluster.nodes:
        where = "in a node" if len(cluster.nodes) == 1 else f"in a node of {node.device.name}"
        for level in node.levels:
            yield (where, *_level(level))


def _level(level: Level) -> tuple[str, ...]:
    what = f"{level.count} {level.name}".rstrip()
    return what, level.topology, _rate(level.bandwidth), _about(level.latency_s, "seconds")
