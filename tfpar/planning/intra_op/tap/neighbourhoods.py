"""Neighbourhoods of a search on one mesh: weight groups in units small enough to price all plans of
each, and the plans of a unit in the order in which they are priced."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from tfpar.planning.intra_op.weights import WeightGroup

MAX_TOGETHER = 128
"""Plans of weights that are searched together though no block holds them, or too large a one."""

_TOKENS = re.compile(r"[/_]+")

Picks = tuple[int, ...]
"""The option taken by each group of a unit."""

Candidates = Callable[[Sequence[WeightGroup]], Iterable[Picks]]
"""The plans of a unit that are priced, in their order."""


def group_units(groups: Sequence[WeightGroup], limit: int) -> list[list[WeightGroup]]:
    """Return `groups` as one unit if it has at most `limit` plans, else by the branches of their
    names.

    Neighbouring branches that are small stay together (the two layers of an MLP).
    """
    if math.prod(len(g.options) for g in groups) <= limit or len(groups) == 1:
        return [list(groups)]
    paths = [_TOKENS.split(g.name) for g in groups]
    shared = len(os.path.commonprefix(paths))
    branches = [
        [groups[i] for i in members]
        for _, members in itertools.groupby(
            range(len(groups)), lambda i: tuple(paths[i][shared : shared + 1])
        )
    ]
    if len(branches) == 1:  # names that differ in nothing a path shows
        half = len(groups) // 2
        return [*group_units(groups[:half], limit), *group_units(groups[half:], limit)]
    out: list[list[WeightGroup]] = []
    for branch in branches:
        together = [*(out[-1] if out else []), *branch]
        if out and math.prod(len(g.options) for g in together) <= MAX_TOGETHER:
            out[-1] = together
        else:
            out += group_units(branch, limit)
    return out


def adjacent(unit: Sequence[WeightGroup]) -> Iterator[Picks]:
    """Yield the plans that differ from the chosen one in at most one weight."""
    return _changed(unit, 1)


def nearby(unit: Sequence[WeightGroup]) -> Iterator[Picks]:
    """Yield the plans that differ from the chosen one in at most two weights, these last."""
    return itertools.chain(_changed(unit, 1), _changed(unit, 2))


def _changed(unit: Sequence[WeightGroup], count: int) -> Iterator[Picks]:
    """All that other options of `count` weights of the chosen plan make of it."""
    chosen = [g.chosen for g in unit]
    for changed in itertools.combinations(range(len(unit)), count):
        for picks in itertools.product(*(range(len(unit[at].options)) for at in changed)):
            new = list(chosen)
            for at, pick in zip(changed, picks, strict=True):
                new[at] = pick
            yield tuple(new)


def every(unit: Sequence[WeightGroup]) -> Iterator[Picks]:
    """Yield all plans of a unit; neighbours differ in one weight, the last varies fastest."""
    sizes = [len(group.options) for group in unit]
    digits, steps = [0] * len(sizes), [1] * len(sizes)
    yield tuple(digits)
    while True:
        for at in reversed(range(len(sizes))):
            moved = digits[at] + steps[at]
            if 0 <= moved < sizes[at]:
                digits[at] = moved
                break
            steps[at] = -steps[at]
        else:
            return
        yield tuple(digits)
