"""2-D tensor parallelism by SUMMA, a baseline: what a transformer's step takes by its own formulas.

Optimus (Xu et al. 2021, "An Efficient 2D Method for Training Super-Large Deep Learning Models")
lays activations and weights over a grid of q x q devices, and multiplies C = A B in q rounds: in
each, every row of the grid broadcasts a panel of A, every column a panel of B, and each device adds
the product of the two to its part of C. Of A = [m, k] a device sends and receives q panels of
m k / q^2 in all, of B = [k, n] as many of k n / q^2, each by a tree of log2(q) rounds. In the
backward pass dA = dC B' broadcasts B and reduces dA, and dB = A' dC broadcasts A and reduces dB, so
that both move what the forward pass moves. For the four products of a transformer's layer it is

    forward      log2(q) / q * (7 b s h + 12 h^2)
    backward     twice as much

2.5-D (Tesseract, Wang et al. 2022) has `depth` such grids that share the batch out and sum the
gradients of weights. Nothing is overlapped, as nothing is there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

from tfpar.cluster.description import Cluster, Device
from tfpar.cluster.network import link_of
from tfpar.cost.collectives import collective_seconds
from tfpar.cost.op_compute import efficiency
from tfpar.spec import Mesh

PRODUCTS_OF_A_STEP = 3
"""For each of the forward pass, that of activations' gradients and that of weights' gradients."""


class Weight(NamedTuple):
    """A matrix that activations are multiplied by."""

    rows: int
    columns: int


def weights_of_layer(hidden: int) -> tuple[Weight, ...]:
    """Of a transformer's layer: query, key and value as one, output, and the two of the
    feed-forward block."""
    one, four = hidden, 4 * hidden
    return Weight(one, 3 * one), Weight(one, one), Weight(one, four), Weight(four, one)


@dataclasses.dataclass(frozen=True)
class Grid:
    """`depth` grids of `side` x `side` devices, columns innermost."""

    side: int
    depth: int = 1

    @classmethod
    def of(cls, devices: int) -> Grid:
        """The widest square that fits as often as there are devices: 4 x 4 of 16, 2 x 2 x 2 of 8.

        Raises:
            ValueError: it would be of one device.
        """
        sides = range(math.isqrt(devices), 1, -1)
        side = next((s for s in sides if devices % (s * s) == 0), None)
        if side is None:
            raise ValueError(f"{devices} devices make no grid of q x q; give a multiple of 4.")
        return cls(side, devices // side**2)

    @property
    def size(self) -> int:
        """How many devices it has."""
        return self.depth * self.side**2

    @property
    def mesh(self) -> Mesh:
        """Over depth, rows and columns."""
        return Mesh(("depth", "row", "column"), (self.depth, self.side, self.side))


def communication_seconds(
    cluster: Cluster, grid: Grid, weights: Iterable[Weight], tokens: int, item_bytes: int
) -> float:
    """Seconds of a step's broadcasts and reductions, and of the sums of gradients over depth.

    Args:
        tokens: of the batch.
        item_bytes: of an activation and of a weight.
    """
    along_rows, along_columns = (link_of(cluster, grid.mesh, (axis,)) for axis in (2, 1))
    rounds = math.log2(grid.side)
    seconds = 0.0
    for weight in weights:
        panels = tokens * weight.rows / grid.size, weight.rows * weight.columns / grid.side**2
        for link, panel in zip((along_rows, along_columns), panels, strict=True):
            once = rounds * (link.latency_s + item_bytes * panel / link.bandwidth)
            seconds += PRODUCTS_OF_A_STEP * grid.side * once
        gradient = item_bytes * weight.rows * weight.columns / grid.side**2
        seconds += collective_seconds("all_reduce", (0,), gradient, grid.mesh, cluster)
    return seconds


def product_seconds(
    device: Device, grid: Grid, weights: Iterable[Weight], tokens: int, dtype: str
) -> float:
    """Seconds that a device multiplies in a step: in `side` rounds of as large a part each."""
    seconds = 0.0
    for rows, columns in weights:
        parts = grid.depth * grid.side, grid.side, grid.side
        sides = [n // part for n, part in zip((tokens, rows, columns), parts, strict=True)]
        rate = device.flops_of(dtype) * efficiency(sides, device.half_size)
        once = 2 * math.prod(sides) / rate + device.launch_s
        seconds += PRODUCTS_OF_A_STEP * grid.side * once
    return seconds
