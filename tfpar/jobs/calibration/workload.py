"""Workload of a calibration: the machines, and the sizes of what is run on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from tfpar.cluster.description import HOST_BANDWIDTH
from tfpar.compile.local.xla_regions import Compiles

Tell = Callable[[str], object]
"""Is told what is measured next."""

ALIKE = 1.2
"""How many times as long as another of its kind a machine or a group of ranks may take."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the ops and collectives that a calibration runs.

    Attributes:
        sides: rows, depth and columns of matrix products.
        half_side: of a square product in 16 bits, and in 32 beside it.
        elements: of elementwise ops.
        payloads: of collectives, in bytes; the first two come first, where time is short.
        spread_bytes: what ops read and write before they come back to the same memory: as much as
            the ops of a step, which find little of what they need in a cache.
        waited: some of `payloads`, which are timed between products, too.
        between: rows, depth and columns of a product that runs before such a one: about a
            millisecond.
    """

    sides: Sequence[tuple[int, int, int]]
    half_side: int
    elements: Sequence[int]
    payloads: Sequence[int]
    spread_bytes: float
    waited: Sequence[int]
    between: tuple[int, int, int]


def _square_and_thin(squares: Sequence[int], thin: int, long: int) -> list[tuple[int, int, int]]:
    found = [(n, n, n) for n in squares]
    return [*found, (thin, long, long), (long, thin, long), (long, long, thin)]


ON_CPU = Sizes(
    _square_and_thin((512, 32, 64, 128, 256), 16, 256),
    256,
    (1 << 18, 1 << 15, 1 << 17, 1 << 20, 1 << 22),
    (1_000, 4_000_000, 130_000, 16_000_000, 1_000_000, 16_000),
    64e6,
    (1_000, 130_000, 16_000),
    (512, 512, 512),
)
ON_GPU = Sizes(
    _square_and_thin((4096, 128, 512, 1024, 2048), 64, 2048),
    2048,
    (1 << 24, 1 << 17, 1 << 20, 1 << 26),
    (1_000, 16_000_000, 300_000, 64_000_000, 2_000_000, 30_000),
    512e6,
    (1_000, 300_000, 30_000),
    (2048, 2048, 2048),
)


@dataclasses.dataclass(frozen=True)
class MachineInfo:
    """Facts of the machines that are known without measuring.

    Attributes:
        nodes: how many.
        name: of a device.
        memory_bytes: of a device.
        one_memory: see `Cluster`.
        host_bandwidth: see `Device`.
        host_memory_bytes: see `Node`.
        compiles: which ops XLA compiles for a device; None: XLA is not measured.
    """

    nodes: int
    name: str
    memory_bytes: float
    one_memory: bool = False
    host_bandwidth: float = HOST_BANDWIDTH
    host_memory_bytes: float | None = None
    compiles: Compiles | None = None

    @property
    def issues_ahead(self) -> bool:
        """Whether a host issues the ops of its devices while these compute: where both are one
        CPU, an op starts when the one before it has ended."""
        return math.isfinite(self.host_bandwidth)
