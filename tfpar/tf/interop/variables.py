"""Variables without a value, and notes of reads and uses for gradient tapes."""

from __future__ import annotations

import contextlib

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

__all__ = [
    "UninitializedVariable",
    "note_read",
    "note_use",
    "tapes_may_record",
    "without_tapes",
]


def note_use(variable: tf.Variable) -> None:
    """Let tapes that watch what is used know that a variable is."""
    resource_variable_ops.variable_accessed(variable)


def without_tapes() -> contextlib.AbstractContextManager[None]:
    """Return a context in which no gradient tape records."""
    return record.stop_recording()


def note_read(value: tf.Tensor, handle: tf.Tensor) -> None:
    """Let gradient tapes take `value` for what a read of `handle` gave."""
    record.record_operation(
        "ReadVariableOp",
        [value],
        [handle],
        backward_function=lambda gradient: [gradient],
        forward_function=lambda tangent: [tangent],
    )


def tapes_may_record() -> bool:
    """Whether a gradient tape is open that might record what comes next."""
    return record.could_possibly_record()
