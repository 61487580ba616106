"""Cases that a test tries: some of them by default, all of them at night."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def at_night(*values: Any) -> list[ParameterSet]:
    """Parameters of which each runs at night alone."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def some_first(some: Iterable[tuple], every: Iterable[tuple]) -> list[tuple | ParameterSet]:
    """Some tuples of parameters, and those of `every` that are not among them at night."""
    chosen = [*some]
    others = (case for case in every if case not in chosen)
    return [*chosen, *(pytest.param(*case, marks=pytest.mark.nightly) for case in others)]


def amounts(some: int, every: int) -> list[ParameterSet]:
    """Numbers of cases, as the parameter of a test that draws them itself."""
    return [
        pytest.param(some, id="some"),
        pytest.param(every, id="every", marks=pytest.mark.nightly),
    ]


def seeds(some: int, every: int) -> list[int | ParameterSet]:
    """Numbers from 0 on, those from `some` on at night."""
    return [*range(some), *at_night(*range(some, every))]
