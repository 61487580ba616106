"""What a cluster must be for costs to make sense."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfpar.spec import TfparError

if TYPE_CHECKING:
    from tfpar.cluster.description import Cluster

TOPOLOGIES = ("switch", "direct", "ring", "bus")
"""How the members of a level are joined: each by one port to a switch (also trees of PCIe
switches); by a link between every two; each to its two neighbours (a torus is a ring of rings);
or all by one line that they share."""

ALGORITHMS = ("ring", "tree", "halving", "hierarchical", "heterogeneous-ring")
"""How a library computes a collective; see `cost.collectives`."""


def check_cluster(cluster: Cluster) -> None:
    """Raise TfparError if a field of `cluster` makes no sense; names the field."""
    wrong = next(_wrongs(cluster), None)
    if wrong is not None:
        raise TfparError(f"Cluster {cluster.name!r}: {wrong}")


def _wrongs(cluster: Cluster) -> Iterator[str]:
    if not cluster.nodes:
        yield "it has no nodes; it needs one `node` at least."
    for i, node in enumerate(cluster.nodes):
        where = f"node[{i}]" if len(cluster.nodes) > 1 else "node"
        yield from _numbers(where, node)
        yield from _numbers(f"{where}.device", node.device)
        if "float32" not in node.device.flops:
            yield f"{where}.device.flops lacks 'float32'."
        for dtype, rate in node.device.flops.items():
            if not rate > 0:
                yield f"{where}.device.flops.{dtype} is {rate}; it must be above 0."
    for where, level in _levels(cluster):
        yield from _numbers(where, level)
        if level.topology not in TOPOLOGIES:
            known = ", ".join(map(repr, TOPOLOGIES))
            yield f"{where}.topology is {level.topology!r}; it must be one of {known}."
    if not cluster.levels and cluster.num_nodes > 1:
        yield (
            f"it has {cluster.num_nodes} nodes, but no `level` that joins them: the link between "
            f"nodes is missing."
        )
    joined = math.prod(level.count for level in cluster.levels)
    if joined != cluster.num_nodes and cluster.levels:
        counts = " x ".join(str(level.count) for level in cluster.levels)
        yield (
            f"its levels join {counts} = {joined} nodes, but it has {cluster.num_nodes}; make "
            f"`count` of `level` and of `node` agree."
        )
    if not 0 <= cluster.overlap <= 1:
        yield (
            f"overlap is {cluster.overlap}; it must be from 0 (a device waits for its "
            f"communication) to 1 (it computes on)."
        )
    if not 0 <= cluster.step_s < math.inf:
        yield f"step_s is {cluster.step_s}; it must be 0 or more."
    unknown = [a for a in cluster.algorithms if a not in ALGORITHMS]
    if unknown or not cluster.algorithms:
        known = ", ".join(map(repr, ALGORITHMS))
        yield f"algorithms is {list(cluster.algorithms)}; it must be some of {known}."
    for i, entry in enumerate(cluster.measured):
        where = f"measured[{i}]"
        yield from _numbers(where, entry)
        if not 0 <= entry.axis < len(entry.mesh):
            yield f"{where}.axis is {entry.axis}, but {where}.mesh has {len(entry.mesh)} axes."
        elif math.prod(entry.mesh) > cluster.size:
            yield (
                f"{where}.mesh has {math.prod(entry.mesh)} ranks, but there are {cluster.size} "
                f"devices."
            )


def _levels(cluster: Cluster) -> Iterator[tuple[str, Any]]:
    for i, level in enumerate(cluster.levels):
        yield (f"level[{i}]" if len(cluster.levels) > 1 else "level"), level
    for n, node in enumerate(cluster.nodes):
        for i, level in enumerate(node.levels):
            outer = f"node[{n}]" if len(cluster.nodes) > 1 else "node"
            yield f"{outer}.level" + (f"[{i}]" if len(node.levels) > 1 else ""), level


_COUNTS = ("count",)
_TIMES = ("launch_s", "latency_s", "startup_s", "half_size")


def _numbers(where: str, part: Any) -> Iterator[str]:
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if not isinstance(value, int | float) or field.name in ("axis",):
            continue
        what = f"{where}.{field.name} is {value}; it must be"
        if field.name in _COUNTS:
            if value < 1 or value != int(value):
                yield f"{what} a whole number, 1 or more."
        elif field.name in _TIMES:
            if not 0 <= value < math.inf:
                yield f"{what} 0 or more."
        elif not value > 0:
            yield f"{what} above 0."
