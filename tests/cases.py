"""How many random cases a test tries: some of them by default, all of them at night."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def seeds(some: int, every: int) -> list[int | ParameterSet]:
    """The seeds below `every` as parameters; those from `some` on run at night alone."""
    return [
        *range(some),
        *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(some, every)),
    ]


def amounts(some: int, every: int) -> list[ParameterSet]:
    """Numbers of cases as parameters of a test that draws them itself."""
    at_night = pytest.param(every, id="every", marks=pytest.mark.nightly)
    return [pytest.param(some, id="some"), at_night]


def some_first(some: Iterable[tuple], every: Iterable[tuple]) -> list[tuple | ParameterSet]:
    """Some tuples of parameters, and those of `every` that are not among them at night."""
    chosen = [*some]
    others = (case for case in every if case not in chosen)
    return [*chosen, *(pytest.param(*case, marks=pytest.mark.nightly) for case in others)]
