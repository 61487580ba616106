"""The batches of the steps that `verify` takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfpar.spec.arguments import argument_error
from tfpar.tf.keras.batches import check_training_batch
from tfpar.tf.keras.preprocessing import batch_as_fit_feeds

Data = tuple[Any, Any, Any]
"""x, y and sample weights, as `fit` takes them."""


class Batches(NamedTuple):
    """Batches, as steps are fed with them.

    Attributes:
        length_is_known: whether `fit` knows how many there are before it has seen the last.
    """

    batches: list[Any]
    length_is_known: bool


def batches_of(model: keras.Model, data: Data, steps: int, batch_size: int | None) -> Batches:
    """The batches of `steps` steps, from the beginning again where there are fewer.

    Args:
        data: arrays, or x gives batches: a `tf.data.Dataset`, a `PyDataset` or a generator.

    Raises:
        ArgumentError: no data, data of unequal lengths, or labels beside what gives batches.
    """
    x, y, sample_weight = data
    if not isinstance(x, tf.data.Dataset | keras.utils.PyDataset | Iterator):
        batch = _checked(model, data)
        return Batches(_cut(keras.utils.unpack_x_y_sample_weight(batch), steps, batch_size), True)
    for name, value in (("y", y), ("sample_weight", sample_weight), ("batch_size", batch_size)):
        if value is not None:
            raise argument_error(name, value, "None beside data that give batches of their own")
    some = [_checked(model, batch) for batch in itertools.islice(_each(x), steps)]
    if not some:
        raise argument_error("x", x, "data that give a batch or more")
    as_tensors = [tree.map_structure(tf.convert_to_tensor, batch) for batch in some]
    return Batches([*itertools.islice(itertools.cycle(as_tensors), steps)], _length_is_known(x))


def _checked(model: keras.Model, batch: Any) -> Any:
    """A batch as the model's `train_step` gets it."""
    batch = batch_as_fit_feeds(model, batch)
    unpacked = keras.utils.unpack_x_y_sample_weight(batch)
    check_training_batch("(x, y, sample_weight)", unpacked, model)
    return keras.utils.pack_x_y_sample_weight(*unpacked)


def _each(data: tf.data.Dataset | keras.utils.PyDataset | Iterator[Any]) -> Iterable[Any]:
    if not isinstance(data, keras.utils.PyDataset):
        return data
    known = data.num_batches
    return map(data.__getitem__, itertools.count() if known is None else range(known))


def _length_is_known(data: tf.data.Dataset | keras.utils.PyDataset | Iterator[Any]) -> bool:
    if isinstance(data, tf.data.Dataset):
        return int(data.cardinality()) != tf.data.UNKNOWN_CARDINALITY
    return isinstance(data, keras.utils.PyDataset) and data.num_batches is not None


def _cut(data: Data, steps: int, batch_size: int | None) -> list[Any]:
    """Consecutive batches of arrays, which are begun anew at their end."""
    total = len(tree.flatten(data[0])[0])
    size = batch_size or total

    def cut(part: Any, begin: int) -> Any:
        return tree.map_structure(lambda a: tf.convert_to_tensor(a[begin : begin + size]), part)

    begins = [i * size % total for i in range(steps)]
    return [
        keras.utils.pack_x_y_sample_weight(
            *(None if part is None else cut(part, begin) for part in data)
        )
        for begin in begins
    ]
