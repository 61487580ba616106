"""The gradients of a step: the tensors that enter a Keras optimizer.

They part forward and backward from the update. `marked_gradients` notes them while a step is
traced, and can leave the updates out: a plan is made from forward and backward alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from keras.optimizers import Optimizer

from tfpar.tf.capture.step import GRADIENTS

Visit = Callable[[list[Any], list[Any]], "list[Any] | None"]
"""Takes gradients and their variables; returns the gradients to apply, None to apply none."""


@contextlib.contextmanager
def visited_gradients(visit: Visit) -> Iterator[None]:
    """Let `visit` see what enters `apply` of optimizers while the current graph is traced inside.

    Of optimizers that call each other (loss scaling) the outermost counts. Gradients that are made
    in a branch or a loop are no tensors of the step: they are applied unseen.
    """
    graph = tf.compat.v1.get_default_graph()
    inside = False

    def visiting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply(self, grads, trainable_variables=None):
            nonlocal inside
            if inside:
                return original(self, grads, trainable_variables)
            grads = list(grads)
            weights = trainable_variables
            if weights is None:
                weights = self._trainable_variables
            tensors = [t for g in grads for t in _tensors(g)]
            if tensors and all(getattr(t, "graph", None) is graph for t in tensors):
                grads = visit(grads, list(weights))
                if grads is None:
                    return None
            inside = True
            try:
                return original(self, grads, trainable_variables)
            finally:
                inside = False

        return apply

    originals = [(c, vars(c)["apply"]) for c in _optimizers() if "apply" in vars(c)]
    for cls, original in originals:
        cls.apply = visiting(original)
    try:
        yield
    finally:
        for cls, original in originals:
            cls.apply = original


@contextlib.contextmanager
def marked_gradients(*, update: bool = True) -> Iterator[None]:
    """Collect what enters `apply` of optimizers while the current graph is traced inside.

    The collection is `GRADIENTS`, in the order of the calls: each variable with its gradient, of a
    sparse one the values and the indices. See `visited_gradients` for what is not seen.

    Args:
        update: if False, `apply` does nothing else: no update and no slots, and sparse gradients
            are made dense. An optimizer whose gradients cannot be marked is run all the same.
    """
    graph = tf.compat.v1.get_default_graph()

    def mark(gradients: list[Any], weights: list[Any]) -> list[Any] | None:
        for weight, gradient in zip(weights, gradients, strict=False):
            marked = _tensors(gradient if update else _dense(gradient))
            if marked:
                variable = getattr(weight, "value", weight)
                graph.add_to_collection(GRADIENTS, (variable, marked))
        return gradients if update else None

    with visited_gradients(mark):
        yield


def _optimizers() -> Iterable[Any]:
    """Keras's optimizer, what it inherits from, and all that inherit from it, each once."""
    return dict.fromkeys((*Optimizer.__mro__, *_classes(Optimizer)))


def _classes(cls: Any) -> Iterable[Any]:
    """`cls` and all that inherit from it, each once."""
    found: dict[Any, None] = {cls: None}
    for sub in cls.__subclasses__():
        found.update(dict.fromkeys(_classes(sub)))
    return found


def _tensors(gradient: Any) -> list[Any]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [] if gradient is None else [gradient]


def _dense(gradient: Any) -> Any:
    """A sparse gradient whose shape is known as a dense one; others as they are."""
    if not isinstance(gradient, tf.IndexedSlices) or gradient.dense_shape is None:
        return gradient
    shape = tf.get_static_value(gradient.dense_shape)
    rows = gradient.dense_shape[0] if shape is None else shape[0]
    # Among the ops of the layer's backward pass, where it belongs.
    scope = gradient.values.op.name.rpartition("/")[0]
    with tf.name_scope(f"{scope}/" if scope else ""):
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
