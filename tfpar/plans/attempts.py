"""`MemoryAttempt`: a move that was tried to make a plan fit into memory."""

from __future__ import annotations

from typing import NamedTuple


class MemoryAttempt(NamedTuple):
    """A plan that a move has made.

    Attributes:
        move: its name, such as `shard slots`.
        seconds: of a step then.
        memory_bytes: the most that a rank stores then.
        fits: whether that is no more than it may.
    """

    move: str
    seconds: float
    memory_bytes: float
    fits: bool
