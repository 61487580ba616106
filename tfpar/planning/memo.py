"""Memo table of results that depend on a problem but not on its objective.

A step is searched several times: for the fastest plan of all, for the fastest that fits, for the
one that stores least. What differs is the objective. How ops run, and what a part of the graph
costs in given surroundings, does not.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

T = TypeVar("T")


class Memo:
    """Tables of results. Whoever keeps results has a type of table for them, of which there is one
    for each problem."""

    def __init__(self) -> None:
        self._tables: dict[type[Any], Any] = {}

    def of(self, table: type[T]) -> T:
        """Return the table of this type, empty at first."""
        if table not in self._tables:
            self._tables[table] = table()
        return cast(T, self._tables[table])
