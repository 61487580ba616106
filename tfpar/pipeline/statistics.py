"""Batch statistics of normalisations: over the batch, or over one microbatch of all ranks."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from tfpar.ir.graph import Op

BatchStatisticsOf = Literal["exact", "microbatch"]
"""The batch, or a microbatch of all ranks ("ghost batches"); see `Pipeline`."""

BATCH_STATISTICS: tuple[BatchStatisticsOf, ...] = get_args(BatchStatisticsOf)


@dataclasses.dataclass(frozen=True, eq=False)
class BatchStatistics:
    """The statistics of a step in microbatches that are those of one microbatch.

    Attributes:
        sums: what sums over the batch of which each microbatch is to read its own part:
            statistics of normalisations, and sums of gradients that lead back to them.
        each: ops that run once a step with exact statistics, and once for each microbatch with its
            own.
    """

    sums: frozenset[Op] = frozenset()
    each: frozenset[Op] = frozenset()


EXACT = BatchStatistics()
"""All are those of the batch."""
