"""The training step with its gradients: kept, returned, or given from outside."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfpar.tf.keras.gradients import visited_gradients

Gradients = Mapping[str, Any]
"""By the path of the variable; with `#2` for the second one that is applied to it in a step, and
`#rows` for the indices of a sparse one."""

RecordingStep = Callable[..., tuple[dict[str, Any], dict[str, Any]]]


class HeldGradients:
    """Variables that take the gradients of a step on the mesh, laid as its optimizers read them.

    A gradient that comes as partial sums may be added up once for the optimizer, which wants a
    shard, and once more for who wants it whole, in another order. What is held follows the weight,
    as a slot does, so that both read the same sum.
    """

    def __init__(self) -> None:
        self._held: dict[str, tf.Variable] = {}

    def hold(self, name: str, gradient: tf.Tensor) -> None:
        """Keep `gradient`; called while the step is traced."""
        if name not in self._held:
            shape, dtype = gradient.shape, gradient.dtype
            told = "gradient_of_" + re.sub(r"[^\w./-]", "_", name)
            with tf.init_scope():
                self._held[name] = tf.Variable(
                    lambda: tf.zeros(shape, dtype), trainable=False, name=told
                )
        self._held[name].assign(gradient)

    def holds(self, variable: tf.Variable) -> bool:
        return any(held is variable for held in self._held.values())

    def read(self) -> dict[str, np.ndarray]:
        """The gradients of the last step."""
        return {name: np.array(v.read_value().numpy()) for name, v in self._held.items()}


def recording_step(model: keras.Model, held: HeldGradients | None = None) -> RecordingStep:
    """`step(data, given)`: the model's train step as a function of tensors.

    It returns what `train_step` returns, by name, and the gradients that enter the optimizers, but
    for those that are `held`. If gradients are `given`, the optimizers apply these instead.
    """

    def step(data: Any, given: Gradients | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        seen: set[str] = set()
        found: dict[str, Any] = {}

        def apply(gradient: Any, weight: Any) -> Any:
            """Record `gradient`, and return the gradient to apply in its place."""
            if gradient is None:
                return None
            name = _name_of(weight, seen)
            if not isinstance(gradient, tf.IndexedSlices):
                if held is not None and gradient.shape.is_fully_defined():
                    held.hold(name, gradient)
                else:
                    found[name] = gradient
                return gradient if given is None else given[name]
            if not gradient.values.shape.is_fully_defined():  # as many rows as the step finds out
                found[name] = tf.convert_to_tensor(gradient)
                return gradient
            rows = f"{name}#rows"
            found[name], found[rows] = gradient.values, gradient.indices
            if given is None:
                return gradient
            return tf.IndexedSlices(given[name], given[rows], gradient.dense_shape)

        def visit(gradients: list[Any], weights: list[Any]) -> list[Any]:
            return [apply(g, w) for g, w in zip(gradients, weights, strict=False)]

        with visited_gradients(visit):
            logs = model.train_step(data)
        return _by_name(logs), found

    return step


def _name_of(weight: Any, seen: set[str]) -> str:
    path = getattr(weight, "path", weight.name)
    name, n = path, 1
    while name in seen:
        n += 1
        name = f"{path}#{n}"
    seen.add(name)
    return name


def _by_name(logs: Any) -> dict[str, Any]:
    if isinstance(logs, dict) and not any(map(tree.is_nested, logs.values())):
        return {name: tf.convert_to_tensor(value) for name, value in logs.items()}
    leaves = tree.flatten(logs)
    return {
        "loss" if i == 0 else f"output {i}": tf.convert_to_tensor(t) for i, t in enumerate(leaves)
    }
