"""Values behind the handles of TensorFlow variables, whatever shape they have at the moment."""

from __future__ import annotations

import tensorflow as tf

from tfpar.tf.interop.variables import UninitializedVariable


def plain_variable(value: tf.Tensor) -> tf.Variable:
    """An ordinary variable, past any creator scope that is active."""
    variable = UninitializedVariable(shape=value.shape, dtype=value.dtype, trainable=False)
    variable.assign(value)
    return variable


def store(variable: tf.Variable, value: tf.Tensor) -> None:
    """Put `value` behind the variable's handle, whatever shape is there now."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)


def release(variable: tf.Variable) -> None:
    """Let go of the memory behind the variable's handle, which stays.

    A function of the user's that was traced before would read it: it finds not-a-number.
    """
    dtype = variable.dtype
    is_number = dtype.is_floating or dtype.is_complex
    store(variable, tf.cast(float("nan"), dtype) if is_number else tf.zeros([0], dtype))
