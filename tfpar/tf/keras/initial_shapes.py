"""Shape and dtype of a Keras weight, read from its initializer instead of traced.

Keras makes a weight from `lambda: initializer(self._shape, dtype=self._dtype)`. Its common
initializers give what they are asked for, whatever it is; tracing one costs about a millisecond.
Whatever is not recognised to the letter is left to be traced.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import keras
import tensorflow as tf
from keras import initializers

_OF_ANY_SHAPE = frozenset(
    {
        initializers.Zeros,
        initializers.Ones,
        initializers.GlorotNormal,
        initializers.GlorotUniform,
        initializers.HeNormal,
        initializers.HeUniform,
        initializers.LecunNormal,
        initializers.LecunUniform,
        initializers.RandomNormal,
        initializers.RandomUniform,
        initializers.TruncatedNormal,
        initializers.VarianceScaling,
    }
)


_DTYPES = frozenset({tf.float16, tf.bfloat16, tf.float32, tf.float64})


def initial_shape(initial: Any) -> tuple[tf.TensorShape, tf.DType] | None:
    """Shape and dtype of what `initial` makes; None if only calling it can tell."""
    if not isinstance(initial, FunctionType) or not _is_of_keras(initial):
        return None
    initializer, weight = (cell.cell_contents for cell in initial.__closure__ or ())
    dtype = tf.as_dtype(weight._dtype)
    if type(initializer) not in _OF_ANY_SHAPE or dtype not in _DTYPES:
        return None
    return tf.TensorShape(weight._shape), dtype


def _is_of_keras(function: FunctionType) -> bool:
    """Whether `function` is Keras's own lambda, and reads as expected."""
    maker = getattr(keras.Variable, "_initialize_with_initializer", None)
    return (
        maker is not None
        and function.__module__ == maker.__module__
        and function.__qualname__ == f"{maker.__qualname__}.<locals>.<lambda>"
        and function.__code__.co_freevars == ("initializer", "self")
        and function.__code__.co_names == ("_shape", "_dtype")
    )
