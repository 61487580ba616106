"""Data as users give it to an unchanged `fit`; every rank is given all of it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

import tfpar as tap
from tests.planning.by_ops import ByOps
from tests.tf.distributed.training.place import (
    Case,
    Place,
    Results,
    floats,
    perceptron,
    regression,
    trained,
    weights,
)

X, Y = regression(21)


def data_parallel_perceptron(place: Place, **arguments) -> keras.Model:
    with place.parallel():
        return perceptron(**arguments)


def arrays_shuffled_under_a_seed(place: Place) -> Results:
    model = data_parallel_perceptron(place)
    return trained(model, X, Y, batch_size=8, epochs=2, shuffle=True)


def datasets_shuffled_under_a_seed(place: Place) -> Results:
    """The last batch is smaller, and no multiple of the ranks."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(21).batch(4)
    return trained(data_parallel_perceptron(place), dataset, epochs=2)


def steps_per_epoch(place: Place) -> Results:
    """Two epochs in one round through the data, and a third into the next."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).repeat().shuffle(5).batch(4)
    model = data_parallel_perceptron(place)
    return trained(model, dataset, epochs=3, steps_per_epoch=2)


class Shuffled(keras.utils.PyDataset):
    """Batches of 6; in another order in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._order = np.random.permutation(len(X))

    def __len__(self) -> int:
        return -(-len(X) // 6)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = self._order[6 * index : 6 * index + 6]
        return X[chosen], Y[chosen]

    def on_epoch_end(self) -> None:
        self._order = np.random.permutation(len(X))


def a_py_dataset(place: Place) -> Results:
    return trained(data_parallel_perceptron(place), Shuffled(), epochs=2, shuffle=False)


def a_generator(place: Place) -> Results:
    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            chosen = np.random.permutation(len(X))[:7]
            yield X[chosen], Y[chosen]

    model = data_parallel_perceptron(place)
    return trained(model, batches(), epochs=2, steps_per_epoch=2)


def weights_of_samples_and_validation(place: Place) -> Results:
    model = data_parallel_perceptron(place, metrics=["mae"], weighted_metrics=["mse"])
    return trained(
        model, X, Y, batch_size=4, sample_weight=np.arange(21.0), validation_split=0.3, epochs=2
    )


def weights_of_classes_and_validation(place: Place) -> Results:
    with place.parallel():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, keras.layers.Dense(3, "softmax", name="fc")(inputs))
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    classes = np.arange(21) % 3
    return trained(
        model,
        X,
        classes,
        batch_size=4,
        class_weight={0: 0.5, 1: 1.0, 2: 3.0},
        validation_data=(X[:9], classes[:9]),
        validation_batch_size=4,
    )


def evaluation_and_prediction(place: Place) -> Results:
    """By a model whose weights are split, on batches that do not divide."""
    with place.split():
        model = perceptron(metrics=["mae"])
    results = trained(model, X[:8], Y[:8], batch_size=4)
    scores = model.evaluate(X, Y, batch_size=4, verbose=0, return_dict=True)
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(5)
    return {
        **results,
        **{f"score/{name}": floats(value) for name, value in scores.items()},
        "predicted": model.predict(X, batch_size=4, verbose=0),
        "predicted/dataset": model.predict(dataset, verbose=0),
        "predicted/batch": np.asarray(model.predict_on_batch(X[:3])),
    }


def several_steps_in_one_execution(place: Place) -> Results:
    model = data_parallel_perceptron(place, steps_per_execution=2)
    return trained(model, X, Y, batch_size=4, epochs=2)


def single_batches(place: Place) -> Results:
    model = data_parallel_perceptron(place)
    losses = [model.train_on_batch(X[:n], Y[:n]) for n in (8, 8, 5)]
    return {
        "losses": floats(losses),
        "tested": floats(model.test_on_batch(X, Y)),
        **weights(model),
    }


def _in_parts(place: Place, planner: ByOps, parts: int) -> Results:
    """By a plan that says how ops run, on data that each rank reads its part of, if it can."""

    def part(index: int, count: int) -> tf.data.Dataset:
        assert count == (parts if place.size > 1 else 1)
        batches = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8 // count)
        return batches.shard(count, index)  # batches of 8 rows, of which each has its own

    with place.parallel(planner=planner):
        model = perceptron()
    batch = tuple(tf.TensorSpec((8, *a.shape[1:]), a.dtype) for a in (X, Y))
    dataset = part(0, 1) if place.size == 1 else tap.shard_data(model, part, batch)
    return trained(model, dataset, epochs=2)


def what_each_op_takes_in_rows_is_read_in_parts(place: Place) -> Results:
    return _in_parts(place, ByOps(), parts=place.size)


def what_an_op_takes_whole_is_read_whole(place: Place) -> Results:
    """The op that compares with the labels is said to read all of them."""
    return _in_parts(place, ByOps(whole=frozenset({"Sub"})), parts=1)


SEEDED: list[Case] = [
    arrays_shuffled_under_a_seed,
    datasets_shuffled_under_a_seed,
    steps_per_epoch,
    a_py_dataset,
    a_generator,
    weights_of_samples_and_validation,
    weights_of_classes_and_validation,
    evaluation_and_prediction,
    several_steps_in_one_execution,
    single_batches,
    what_each_op_takes_in_rows_is_read_in_parts,
    what_an_op_takes_whole_is_read_whole,
]


# --- without a seed, ranks agree with each other ------------------------------------------------


def _unseeded() -> None:
    """Every generator as in a process that nobody has seeded."""
    random.seed(os.getpid())
    np.random.seed(os.getpid())
    tf.random.set_seed(None)
    keras.utils.clear_session(free_memory=False)  # and with it the generator of Keras


def _falls(results: Results) -> Results:
    """The results, of which the loss of an epoch falls."""
    losses = results["history/loss"]
    assert losses[-1] < losses[0], losses
    return results


def nothing_seeded(place: Place) -> Results:
    """Initial weights, order of samples and dropout are drawn."""
    _unseeded()
    with place.parallel():
        inputs = keras.Input((6,))
        h = keras.layers.Dropout(0.1)(keras.layers.Dense(10, "tanh")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(2)(h))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return _falls(trained(model, X, Y, batch_size=4, epochs=6, shuffle=True))


def datasets_shuffled_without_a_seed(place: Place) -> Results:
    _unseeded()
    with place.parallel():
        model = perceptron(keras.optimizers.SGD(0.1))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(21).batch(4)
    return _falls(trained(model, dataset, epochs=6))


class Noise(keras.layers.Layer):
    """Adds what TensorFlow's own random ops draw."""

    def call(self, x, training=False):
        return x + 0.01 * tf.random.normal(tf.shape(x), dtype=x.dtype) if training else x


def random_ops_with_a_state(place: Place) -> Results:
    with place.split():
        inputs = keras.Input((6,))
        h = keras.layers.Dense(10, "tanh", name="fc1")(Noise()(inputs))
        model = keras.Model(inputs, keras.layers.Dense(2)(Noise()(h)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return _falls(trained(model, X, Y, batch_size=7, epochs=6))


UNSEEDED: list[Case] = [
    nothing_seeded,
    datasets_shuffled_without_a_seed,
    random_ops_with_a_state,
]
