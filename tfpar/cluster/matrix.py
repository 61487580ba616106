"""ATP's hierarchical communication matrix and its cost of 2-D tensor parallelism (§3.3-3.5)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tfpar.cluster.description import Cluster, Level
from tfpar.cluster.network import find_measurement, link_of
from tfpar.spec import Mesh


@dataclasses.dataclass(frozen=True, eq=False)
class LinkTier:
    """Layer of the matrix: members of a level, seen from one of the places it joins.

    Attributes:
        p2p: (members, members) bytes/s between any two, all the links between them together.
        group: bytes/s between one member and the world outside of it.
    """

    level: Level
    p2p: np.ndarray
    group: float


def hierarchical_matrix(cluster: Cluster) -> list[LinkTier]:
    """List the layers from outside in, of the first place at each depth (Fig. 7)."""
    levels = [*cluster.levels, *(cluster.nodes[0].levels)]
    return [LinkTier(level, _p2p(level), level.bandwidth) for level in levels]


def _p2p(level: Level) -> np.ndarray:
    matrix = np.full((level.count, level.count), level.pair_bandwidth)
    if level.topology == "ring":
        apart = np.abs(np.subtract.outer(np.arange(level.count), np.arange(level.count)))
        matrix[(apart != 1) & (apart != level.count - 1)] = 0.0
    np.fill_diagonal(matrix, 0.0)
    return matrix


def device_meshes(size: int) -> list[tuple[int, int]]:
    """List every DeviceMesh(d1, d2) of `size` devices, (size, 1) first."""
    return [(size // d2, d2) for d2 in range(1, size + 1) if size % d2 == 0]


def link_bandwidths(cluster: Cluster, d1: int, d2: int) -> tuple[float, float]:
    """Compute B1' and B2' of DeviceMesh(d1, d2) in bytes/s (eq. 3, see `network`); inf for a size
    of 1."""
    mesh = Mesh(("d1", "d2"), (d1, d2))
    first, second = (link_of(cluster, mesh, (axis,)).bandwidth for axis in (0, 1))
    return first, second


def reduce_bandwidths(cluster: Cluster, d1: int, d2: int) -> tuple[float, float]:
    """Compute B1 and B2: bytes of payload that an all-reduce moves a second (eq. 4, or as
    measured)."""
    found = []
    for axis, (size, bandwidth) in enumerate(
        zip((d1, d2), link_bandwidths(cluster, d1, d2), strict=True)
    ):
        known = find_measurement(cluster, "all_reduce", Mesh(("d1", "d2"), (d1, d2)), (axis,))
        if known is not None:
            found.append(known.bandwidth)
        else:
            found.append(math.inf if size == 1 else size / (2 * (size - 1)) * bandwidth)
    return found[0], found[1]


def tensor_parallel_seconds(
    cluster: Cluster, d1: int, d2: int, hidden_bytes: float, layers: int = 1
) -> float:
    """Price T_comm of eq. 2: seconds a step of a transformer's all-reduces on DeviceMesh(d1, d2).

    Args:
        hidden_bytes: of one [batch, sequence, hidden] tensor.
    """
    first, second = reduce_bandwidths(cluster, d1, d2)
    return 2 * layers * hidden_bytes * (7 / (d1 * second) + 2 / (d2 * first))
