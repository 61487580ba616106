"""Preprocessing that a model applies to its data: KerasHub's tasks tokenize, resize, label.

`fit` of such a task maps its `preprocess_samples` over the data. Whatever else takes a batch from
the user, to plan or to compare, does the same here.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def batch_as_fit_feeds(model: keras.Model, batch: Any) -> Any:
    """Preprocess `batch` as the model's `fit` does before its `train_step` gets it.

    Args:
        batch: `(x, y)` or `(x, y, sample_weight)`, or `x` alone. `tf.TensorSpec`s, and a dict
            that names the model's inputs, are taken as preprocessed.
    """
    given = batch if isinstance(batch, tuple) else (batch,)
    if not given or not _is_preprocessed_by(model, given[0]):
        return batch
    fed = keras.utils.unpack_x_y_sample_weight(model.preprocess_samples(*given))
    while fed[-1] is None:
        fed = fed[:-1]
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), tuple(fed)
    )


def _is_preprocessed_by(model: keras.Model, x: Any) -> bool:
    """Whether the model's `fit` would do anything to `x`."""
    if getattr(model, "preprocessor", None) is None or not hasattr(model, "preprocess_samples"):
        return False
    if any(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(x)):
        return False
    inputs = getattr(model, "_inputs_struct", None)
    return not (isinstance(x, dict) and isinstance(inputs, dict) and x.keys() == inputs.keys())


def sequence_length(model: keras.Model) -> int | None:
    """The length to which the model's preprocessor pads text; None if it has no such."""
    length = getattr(getattr(model, "preprocessor", None), "sequence_length", None)
    return length if isinstance(length, int) else None
