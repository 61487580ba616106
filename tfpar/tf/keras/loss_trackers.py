"""Keras's loss trackers, one per output, weigh a batch by its size only where that size is static.

`fit` on arrays, generators and most datasets gives Keras batches of unknown size, whose losses it
averages with equal weights. A captured step has static sizes; here it is told to do the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf


@contextlib.contextmanager
def equal_weights(model: keras.Model) -> Iterator[None]:
    """Run a block in which the loss trackers of `model` weigh all batches equally."""
    original = keras.metrics.Mean.update_state

    @functools.wraps(original)
    def update_state(self, values, sample_weight=None):
        trackers = getattr(model._compile_loss, "metrics", ())
        if any(self is tracker for tracker in trackers):
            sample_weight = None
        return original(self, values, sample_weight)

    keras.metrics.Mean.update_state = update_state
    try:
        yield
    finally:
        keras.metrics.Mean.update_state = original


def batch_is_unknown(iterator: Any) -> bool:
    """Whether Keras would see batches of unknown size in what `iterator` gives."""
    specs = tf.nest.flatten(getattr(iterator, "element_spec", ()), expand_composites=True)
    shapes = [s.shape for s in specs if isinstance(s, tf.TensorSpec) and s.shape.rank]
    return any(shape[0] is None for shape in shapes)
