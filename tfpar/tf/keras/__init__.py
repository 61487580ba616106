"""Integration with Keras: training loop, callbacks, saving and checkpoints of parallel models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.tf.keras.adapter import install, parallel_model, state_of

__all__ = [
    "install",
    "parallel_model",
    "state_of",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.tf.keras.adapter": ["install", "parallel_model", "state_of"],
    },
)
