"""Schema of a step as it was measured, beside the predicted one."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MeasuredSlice:
    """Slice of a lane, from start to end in seconds from the start of the step.

    Attributes:
        category: `forward`, `backward`, `update`, ... or `waiting` for a rank that comes late.
    """

    name: str
    category: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class MeasuredLane:
    """Thread of a rank: `tasks`, `compute` or `communication`, and the number of its lane."""

    rank: int
    thread: str
    slices: tuple[MeasuredSlice, ...]


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """One of the steps that `tap.Timeline` recorded: that of median length.

    Attributes:
        source: the name of the timeline's file.
        number: of the step, as the file counts.
        seconds: from the first rank that begins it to the last that ends it.
        all_seconds: likewise of each step of the file.
        ranks: of the file; `lanes` are of the first of them where there are too many slices.
    """

    source: str
    number: int
    seconds: float
    all_seconds: tuple[float, ...]
    ranks: int
    lanes: tuple[MeasuredLane, ...]
