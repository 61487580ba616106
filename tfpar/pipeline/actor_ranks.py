"""Ranks of the actors of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence


def groups_of(num_actors: int, size: int, ranks: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each actor, `size` of them.

    Args:
        ranks: of the job, actor by actor; by default in their order.
    """
    ranks = ranks or range(num_actors * size)
    return tuple(tuple(ranks[a * size : (a + 1) * size]) for a in range(num_actors))
