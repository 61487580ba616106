"""Observation of TensorFlow ops as they are created."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from tensorflow.python.framework import op_callbacks


@contextlib.contextmanager
def watched_ops(callback: Callable[..., Sequence[tf.Tensor] | None]) -> Iterator[None]:
    """Call `callback(op_type, inputs, attrs, outputs, ...)`, while open, for each op that is made.

    What it returns takes the place of the outputs, unless that is None.
    """
    op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(callback)
