"""Fitting plans into memory: one loop (`fit`) over named moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.planning.memory.recompute import recomputed_problem

__all__ = [
    "recomputed_problem",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.planning.memory.recompute": ["recomputed_problem"],
    },
)
