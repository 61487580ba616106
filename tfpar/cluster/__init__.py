"""Descriptions of clusters: devices, nodes, and the levels of links that join them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.cluster.check import ALGORITHMS, TRANSFER
    from tfpar.cluster.description import Cluster, Device, Level, MeasuredCollective, Node
    from tfpar.cluster.files import cluster_of, describe, read_cluster, write_cluster
    from tfpar.cluster.lookup import find_cluster, fit_to_mesh, preset_names, read_preset
    from tfpar.cluster.network import (
        Link,
        find_measurement,
        likeness,
        link_of,
        path_between,
        transfer_link,
    )
    from tfpar.cluster.scaling import (
        Correction,
        LinkSlowdown,
        scale_bandwidth,
        scale_times,
        spans_nodes,
    )

__all__ = [
    "ALGORITHMS",
    "TRANSFER",
    "Cluster",
    "Correction",
    "Device",
    "Level",
    "Link",
    "LinkSlowdown",
    "MeasuredCollective",
    "Node",
    "cluster_of",
    "describe",
    "find_cluster",
    "find_measurement",
    "fit_to_mesh",
    "likeness",
    "link_of",
    "path_between",
    "preset_names",
    "read_cluster",
    "read_preset",
    "scale_bandwidth",
    "scale_times",
    "spans_nodes",
    "transfer_link",
    "write_cluster",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.cluster.check": ["ALGORITHMS", "TRANSFER"],
        "tfpar.cluster.description": ["Cluster", "Device", "Level", "MeasuredCollective", "Node"],
        "tfpar.cluster.files": ["cluster_of", "describe", "read_cluster", "write_cluster"],
        "tfpar.cluster.lookup": ["find_cluster", "fit_to_mesh", "preset_names", "read_preset"],
        "tfpar.cluster.network": [
            "Link",
            "find_measurement",
            "likeness",
            "link_of",
            "path_between",
            "transfer_link",
        ],
        "tfpar.cluster.scaling": [
            "Correction",
            "LinkSlowdown",
            "scale_bandwidth",
            "scale_times",
            "spans_nodes",
        ],
    },
)
