"""Variables of parallel models: pending (without a value yet), whole, or sharded over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.tf.variables.parallel_variable import ParallelVariable

__all__ = [
    "ParallelVariable",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.tf.variables.parallel_variable": ["ParallelVariable"],
    },
)
