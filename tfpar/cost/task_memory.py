"""What a task of a pipeline has in memory while it runs: liveness over its ops (`cost.memory`)."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from tfpar.cost.memory import Buffer, Lives
from tfpar.ir.graph import Op


def entering(lives: Lives, ops: Sequence[Op]) -> list[Buffer]:
    """The buffers that a task reads and does not make, in the order of reading."""
    inside = set(ops)
    read = (buffer for op in ops for buffer in lives.used(op))
    return [*dict.fromkeys(buffer for buffer in read if buffer[0].op not in inside)]


def task_peak(
    lives: Lives,
    ops: Sequence[Op],
    size: Callable[[Buffer], float],
    outliving: Container[Buffer] = (),
    passing: Mapping[Op, float] | None = None,
) -> float:
    """The most bytes that a task holds at once, of what it is given and what it makes.

    Args:
        ops: in the order in which they run.
        size: bytes of a buffer; 0 for what is counted elsewhere.
        outliving: buffers that are there when it ends; all others go once nothing reads them.
        passing: see `cost.memory.peak`.
    """
    passing = passing or {}
    last: dict[Buffer, Op] = {}
    made: dict[Op, list[Buffer]] = {}
    given = entering(lives, ops)
    outside = set(given)
    for op in ops:
        for buffer in lives.used(op):
            if buffer not in last and buffer not in outside:
                made.setdefault(buffer[0].op, []).append(buffer)
            last[buffer] = op
    dying: dict[Op, list[Buffer]] = {}
    for buffer, op in last.items():
        if buffer not in outliving:
            dying.setdefault(op, []).append(buffer)
    now = most = sum(map(size, given))
    for op in ops:
        ends = dying.get(op, ())
        over = lives.overwritten(op, ends)
        now += sum(map(size, made.get(op, ()))) - sum(map(size, over))
        most = max(most, now + passing.get(op, 0.0))
        now -= sum(size(buffer) for buffer in ends if buffer not in over)
    return most
