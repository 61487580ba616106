"""Limits that users set on the stages of a pipeline."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StageLimits:
    """Limits of the stages of a pipeline.

    Attributes:
        tolerance: by how much, relative to the average, a stage may compute longer (Rhino §5.2);
            None: as `assign` sees fit.
        memory_bytes: that a rank of each actor may store, if its device has as much; none: what its
            device has.
    """

    tolerance: float | None = None
    memory_bytes: tuple[float, ...] = ()


NO_LIMITS = StageLimits()
