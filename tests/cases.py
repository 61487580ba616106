"""Cases that a test tries: some of them by day, all of them at night (`make test-nightly`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

_VARIABLE = "TFPAR_TEST_NIGHTLY"


def is_nightly() -> bool:
    """Whether tests that are marked `nightly` run too, and sweeps take all of their cases."""
    return os.environ.get(_VARIABLE) == "1"


def set_nightly(marks: str) -> None:
    """Tell this process, and those that it starts, by the marks that pytest was asked for."""
    os.environ[_VARIABLE] = "0" if "not nightly" in marks else "1"


def nightly(*values: Any) -> ParameterSet:
    """One case, of several parameters or one, that runs at night alone."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def at_night(*values: Any) -> list[ParameterSet]:
    """Parameters of which each runs at night alone."""
    return [nightly(value) for value in values]


def some_first(some: Iterable[tuple], every: Iterable[tuple]) -> list[tuple | ParameterSet]:
    """Some tuples of parameters, and those of `every` that are not among them at night."""
    chosen = [*some]
    others = (case for case in every if case not in chosen)
    return [*chosen, *(nightly(*case) for case in others)]


def deep_list() -> list[Any]:
    """A list in lists, deeper than `repr` goes."""
    found: list[Any] = []
    for _ in range(5000):
        found = [found]
    return found


def amounts(some: int, every: int) -> list[ParameterSet]:
    """Numbers of cases, as the parameter of a test that draws them itself."""
    return [
        pytest.param(some, id="some"),
        pytest.param(every, id="every", marks=pytest.mark.nightly),
    ]


def seeds(some: int, every: int) -> list[int | ParameterSet]:
    """Numbers from 0 on, those from `some` on at night."""
    return [*range(some), *at_night(*range(some, every))]
