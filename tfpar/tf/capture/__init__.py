"""Capture of steps: traced Keras steps and functions, and existing graphs of TensorFlow 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.tf.capture.step import CapturedStep, argument_specs, capture_step

__all__ = [
    "CapturedStep",
    "argument_specs",
    "capture_step",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.tf.capture.step": ["CapturedStep", "argument_specs", "capture_step"],
    },
)
