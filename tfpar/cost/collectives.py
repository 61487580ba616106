"""How long one collective takes on a cluster: latency and bandwidth (alpha-beta).

Libraries choose an algorithm by size: trees and halving for small messages, rings for large ones.
Reductions and gathers are priced as recursive halving and doubling (Rabenseifner), which has the
rounds of the one and the traffic of the other.
"""

from __future__ import annotations

import functools
import math

from tfpar.cost.cluster import Cluster
from tfpar.spec import Mesh

# How often the payload is passed on; a broadcast is a pipelined tree.
_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


@functools.lru_cache(maxsize=65536)
def startup_seconds(kind: str, axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> float:
    """The part of a collective's time that its size does not change, in seconds."""
    ranks = mesh.group_size(axes)
    latency = cluster.link_of(mesh, axes, kind == "all_to_all").latency_s
    if kind == "all_to_all":
        return (ranks - 1) * latency  # a message for each of the others
    rounds = math.ceil(math.log2(ranks))
    return (1 if kind == "broadcast" else _PASSES[kind]) * rounds * latency


@functools.lru_cache(maxsize=65536)
def seconds_per_byte(kind: str, axes: tuple[int, ...], mesh: Mesh, cluster: Cluster) -> float:
    """Seconds for each byte of payload (`reshard.step_bytes`) on one rank's link.

    (n - 1) / n of the payload is moved, by an all-reduce twice that.
    """
    ranks = mesh.group_size(axes)
    share = 1.0 if kind == "broadcast" else _PASSES[kind] * (ranks - 1) / ranks
    return share / cluster.link_of(mesh, axes, kind == "all_to_all").bandwidth


def collective_seconds(
    kind: str, axes: tuple[int, ...], num_bytes: float, mesh: Mesh, cluster: Cluster
) -> float:
    """Time of a collective over mesh axes `axes`, in seconds.

    Args:
        kind: one of `reshard.COLLECTIVES`.
        num_bytes: the payload on one rank, in bytes, as `reshard.step_bytes` counts it.
    """
    if mesh.group_size(axes) == 1:
        return 0.0
    return startup_seconds(kind, axes, mesh, cluster) + num_bytes * seconds_per_byte(
        kind, axes, mesh, cluster
    )
