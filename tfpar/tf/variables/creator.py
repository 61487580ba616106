"""Variable creator of a session's scope: variables of known shape become pending ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpar.tf.variables.parallel_variable import ParallelVariable

Made = tuple[tf.TensorShape, tf.DType]
"""Shape and dtype of what an initial value makes."""


def create_variable(
    next_creator: Callable[..., tf.Variable],
    *,
    made_by: Callable[[Callable[[], Any]], Made | None] = lambda initial: None,
    **kwargs: Any,
) -> tf.Variable:
    """A variable creator: only a shape and an initializer, no value yet.

    What has no fixed shape, or is no number, is left to `next_creator`.

    Args:
        made_by: tells what a callable makes without calling it, or None where it cannot; then
            the callable is traced.
        kwargs: as TensorFlow gives them to variable creators.
    """
    initial = kwargs.get("initial_value")
    dtype = kwargs.get("dtype")
    if initial is None:
        return next_creator(**kwargs)
    if callable(initial):
        shape, inferred = made_by(initial) or _traced(initial)
    else:
        tensor = _outside(initial, dtype)
        shape, inferred = tensor.shape, tensor.dtype
        initial = functools.partial(tf.identity, tensor)
    dtype = tf.as_dtype(dtype) if dtype is not None else inferred
    numeric = dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool
    if shape.rank is None or not shape.is_fully_defined() or not numeric:
        return next_creator(**kwargs)
    trainable = kwargs.get("trainable")
    return ParallelVariable(
        shape=shape,
        dtype=dtype,
        initial_value=initial,
        name=kwargs.get("name"),
        trainable=True if trainable is None else trainable,
    )


def _traced(initial: Callable[[], Any]) -> Made:
    """Infer shape and dtype of the value of `initial` by tracing it in a scratch graph."""
    # A FuncGraph, because it takes eager tensors, which a plain Graph does not.
    with tf.__internal__.FuncGraph("scratch_graph_of_shape").as_default():
        tensor = tf.convert_to_tensor(initial())
        return tensor.shape, tensor.dtype.base_dtype


def _outside(initial: Any, dtype: Any) -> tf.Tensor:
    """The value that an initial value has outside of the step that is being traced."""
    with tf.init_scope():
        if not tf.is_symbolic_tensor(initial):
            return tf.convert_to_tensor(initial, dtype=dtype)

        def compute() -> tf.Tensor:
            graph = tf.compat.v1.get_default_graph()
            return tf.__internal__.lift_to_graph([initial], graph)[initial]

        return tf.cast(tf.function(compute, autograph=False)(), dtype or initial.dtype)
