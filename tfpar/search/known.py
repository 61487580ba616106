"""What planners have found out about a problem, and keep for when it is asked again.

A step is searched several times: for the fastest plan of all, for the fastest that fits, for the
one that stores least. What differs is the objective. How ops run, and what a part of the graph
costs in given surroundings, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Known:
    """Values by what they are of."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `key`, which `make` makes the first time."""
        if key not in self._values:
            self._values[key] = make()
        return cast(T, self._values[key])
