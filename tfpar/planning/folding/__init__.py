"""The folded graph: one of each block that repeats is searched for all of them (TAP §IV-C)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.planning.folding.folded_model import FoldedModel

__all__ = [
    "FoldedModel",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.planning.folding.folded_model": ["FoldedModel"],
    },
)
