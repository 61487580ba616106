"""Checks of the batches that users give, made before a step is traced for them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfpar.spec.arguments import argument_error

_TENSORS = "arrays or tf.TensorSpecs whose first dim is the batch"


def check_batch(name: str, batch: Any) -> None:
    """Refuse what holds no samples, or not as many everywhere.

    Strings pass: what they are is for a model's preprocessor to say.

    Args:
        name: of the argument, in messages.
        batch: an array or a spec, or several in any structure.

    Raises:
        ArgumentError: as said.
    """
    try:
        leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    except RecursionError:
        raise argument_error(name, batch, _TENSORS) from None
    if isinstance(batch, str | bytes) or not leaves:
        raise argument_error(name, batch, _TENSORS)
    sizes = []
    for leaf in leaves:
        if isinstance(leaf, str | bytes):
            continue
        shape = getattr(leaf, "shape", None)
        if shape is None or len(shape) == 0:
            raise argument_error(f"{name} holds what", leaf, _TENSORS)
        sizes.append(shape[0])
    if len({size for size in sizes if size is not None}) > 1:
        raise argument_error(f"{name} holds batches, whose sizes", sizes, "the same")


def check_training_batch(name: str, batch: Any, model: keras.Model) -> None:
    """Check a batch as `check_batch` does, and that it has labels if a loss needs them."""
    check_batch(name, batch)
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    own = type(model).train_step is not keras.Model.train_step
    if y is None and getattr(model, "loss", None) is not None and not own:
        raise argument_error(
            name, batch, f"(x, y): model {model.name!r} has a loss, which needs labels"
        )
