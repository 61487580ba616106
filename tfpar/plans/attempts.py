"""`MemoryAttempt`: a move that was tried to make a plan fit into memory."""

from __future__ import annotations

from typing import NamedTuple


class MemoryAttempt(NamedTuple):
    """A plan that a move has made.

    Attributes:
        move: its name, such as `shard slots`; of a search of pipelines, the microbatches that were
            tried.
        seconds: of a step then; None where no plan was priced.
        memory_bytes: the most that a rank stores then; where there is no plan, at least.
        fits: whether that is no more than it may.
    """

    move: str
    seconds: float | None
    memory_bytes: float
    fits: bool
