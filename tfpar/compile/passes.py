"""Passes of the compiler, each with its name, from graph to graph; and their observers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from tfpar.ir.graph import Graph


@dataclasses.dataclass(frozen=True)
class Pass:
    """One step of the compiler.

    Attributes:
        name: in words, as dumps show it.
        run: gives the graph after it: the same one, changed in place, or another.
    """

    name: str
    run: Callable[[Graph], Graph]


class Observer(Protocol):
    """Observer of passes, called after each."""

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        """See what came of a pass.

        Args:
            name: of the pass; "captured" before the first one.
            text: writes the graph as text; costs time, and only holds until the next pass.
        """


def ignore_pass(name: str, text: Callable[[], str]) -> None:
    """Ignore the pass, as an observer who does not look."""
