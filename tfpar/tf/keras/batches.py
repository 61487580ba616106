"""Batches that users give: checked before a step is traced for them, preprocessed as `fit` does,
and
marked where a dataset gives parts of them."""

from __future__ import annotations

from collections.abc import Iterator
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


# --- preprocessing --------------------------------------------------------------------------
# KerasHub's tasks tokenize, resize, label: `fit` of such a task maps its `preprocess_samples` over
# the data. Whatever else takes a batch from the user, to plan or to compare, does the same here.


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


# --- parts of global batches ----------------------------------------------------------------
# The mark of datasets that give them (see `data.shard_data`).

_MARK = "_tfpar_parts"


def mark_parts(dataset: tf.data.Dataset, count: int) -> None:
    """Mark a dataset that gives one of `count` parts of each global batch."""
    setattr(dataset, _MARK, count)


def parts_of(iterator: Iterator[Any]) -> int:
    """Count the parts of a global batch, of which `iterator` gives one; 1 if it gives the whole."""
    todo = [getattr(iterator, "_dataset", None)]
    while todo:
        dataset = todo.pop()
        if isinstance(dataset, tf.data.Dataset):
            if hasattr(dataset, _MARK):
                return int(getattr(dataset, _MARK))
            todo += dataset._inputs()
    return 1
