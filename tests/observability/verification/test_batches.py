"""Data that give batches, and what `fit` makes of it where their length is unknown."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from tfpar.observability.verification.run import batches_of
from tfpar.spec import ArgumentError

BATCHES, EPOCHS = 4, 3
X, Y = np.arange(24.0, dtype="float32").reshape(8, 3), np.ones((8, 2), "float32")
FORM = tf.TensorSpec((2, 3)), tf.TensorSpec((2, 2))


def generated():
    for i in range(0, 8, 2):
        yield X[i : i + 2], Y[i : i + 2]


def dataset(known: bool) -> tf.data.Dataset:
    if known:
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)
    return tf.data.Dataset.from_generator(generated, output_signature=FORM)


class Sequence(keras.utils.PyDataset):
    def __init__(self, known: bool) -> None:
        super().__init__()
        self._known = known

    def __getitem__(self, i):
        return X[2 * i : 2 * i + 2], Y[2 * i : 2 * i + 2]

    @property
    def num_batches(self):
        return BATCHES if self._known else None


def build(mesh: list[int] | None, **options) -> keras.Model:
    block = tap.auto_parallel(mesh, planner=None, verbose=0) if mesh else contextlib.nullcontext()
    with block:
        inputs = keras.Input((3,))
        h = layers.Dropout(0.5, seed=1, name="drop")(inputs)
        model = keras.Model(inputs, layers.Dense(2, name="head")(h), name="net")
        model.compile("adam", "mse", **{"jit_compile": False, **options})
    return model


def counts(model: keras.Model) -> tuple[int, int]:
    """Of steps, by the optimizer, and of masks, by the seed of the dropout."""
    seed = model.get_layer("drop").seed_generator.state
    return int(model.optimizer.iterations), int(np.array(seed)[1])


@pytest.mark.slow
def test_plain_keras_runs_what_needs_no_data_once_more_an_epoch_and_verify_says_so():
    plain, model = build(None), build([2])
    plain.fit(dataset(known=False), epochs=EPOCHS, verbose=0)
    assert counts(plain) == (15, 15)
    assert int(plain.metrics[0].variables[1]) == 2 * (BATCHES + 1)  # a divisor of the mean loss
    model.fit(dataset(known=False), epochs=EPOCHS, verbose=0)
    assert counts(model) == (12, 12)
    report = tap.verify(model, dataset(known=False), steps=2)
    assert report.ok and counts(model) == (12, 12)
    seed, count = model.get_layer("drop").seed_generator.state, model.metrics[0].variables[1]
    assert {*report.extra} == {model.optimizer.iterations.path, seed.path, count.path}
    assert report.notes == [str(report).splitlines()[-1]] and not report.reasons
    assert "data of unknown length" in report.notes[0] and seed.path in report.notes[0]


@pytest.mark.parametrize(
    "data, known",
    [
        (lambda: dataset(True), True),
        (lambda: dataset(False), False),
        (generated, False),
        (lambda: Sequence(True), True),
        (lambda: Sequence(False), False),
    ],
)
def test_the_first_batches_are_taken_and_begun_anew(data, known):
    model = build(None)
    found = batches_of(model, (data(), None, None), 3, None)
    assert found.length_is_known == known
    np.testing.assert_array_equal(np.concatenate([x for x, _ in found.batches]), X[:6])
    if known:
        assert len(batches_of(model, (data(), None, None), BATCHES + 1, None).batches) == 5


def test_labels_beside_data_that_give_batches_are_refused():
    model = build(None)
    with pytest.raises(ArgumentError, match="batch_size is 2; it must be None beside data that"):
        batches_of(model, (generated(), None, None), 1, 2)
    with pytest.raises(ArgumentError, match="data that give a batch or more"):
        batches_of(model, (iter([]), None, None), 1, None)
