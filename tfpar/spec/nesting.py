"""Splits of one dim by two axes: which one is said first, with the same entries on each rank.

The inner axis of a spec splits what the outer one has left. So where the outer axis is taken away,
or put in, the same entries on a rank are another placement along the inner one. Eight entries:

    S(0),S(0)      outer 0: 0 1 2 3, of which inner 0 has 0 1;  outer 1: 4 5 6 7, inner 0: 4 5
    R,S(0/4)       inner 0 has 0 1 4 5 of both: the first half of each four
"""

from __future__ import annotations

from tfpar.spec.placement import Shard


def without_outer(
    inner: Shard, outer: Shard, length: int, outer_parts: int, inner_parts: int
) -> Shard | None:
    """Return the placement along the inner axis of what both axes leave to any of the outer ranks,
    in the dim as it is before `outer` splits it; None if no placement says so.

    Args:
        inner: splits what `outer` leaves.
        length: of the dim before both.
    """
    cut = _runs(outer, length, outer_parts)
    if cut is None:
        return None
    run, own = cut
    return _in_other_runs(inner, length // run * own, inner_parts, own, run, length)


def within_outer(
    inner: Shard, outer: Shard, length: int, outer_parts: int, inner_parts: int
) -> Shard | None:
    """Undo `without_outer`: return the placement along the inner axis that leaves of an outer
    rank's entries those that `inner` has in the whole dim; None if no placement says so."""
    cut = _runs(outer, length, outer_parts)
    if cut is None:
        return None
    run, own = cut
    return _in_other_runs(inner, length, inner_parts, run, own, length // run * own)


def _runs(outer: Shard, length: int, parts: int) -> tuple[int, int] | None:
    """The runs that an axis cuts evenly, and how long one rank's part of a run is."""
    if length == 0 or not outer.fits(length) or not outer.is_even(length, parts):
        return None
    run = length if outer.stride is None else outer.stride
    return run, run // parts


def _in_other_runs(
    inner: Shard, length: int, parts: int, run: int, other: int, other_length: int
) -> Shard | None:
    """`inner`, which splits a dim of `length`, where its runs of `run` are `other` long."""
    if not inner.fits(length) or not inner.is_even(length, parts):
        return None
    stride = length if inner.stride is None else inner.stride
    if min(run, other) % stride == 0:  # of each part of a run, the same
        made = stride
    elif stride % run == 0 and stride // run % parts == 0:  # whole runs
        made = stride // run * other
    else:
        return None
    shard = Shard(inner.dim, None if made == other_length else made, inner.unit)
    return shard if shard.fits(other_length) else None
