"""The price of a plan: its whole step, in sub-batches, stages and shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.planning.pricing.plan_propagation import propagate_plan

__all__ = [
    "propagate_plan",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.planning.pricing.plan_propagation": ["propagate_plan"],
    },
)
