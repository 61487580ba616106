"""One rank alone is fed other data, or changes what all hold in common: all ranks are told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.tf.distributed.training.place import Case, Place, Results, perceptron, regression
from tfpar.spec import RuntimeMismatchError

AT = 5
"""The step before which it happens."""

STEPS = 3000
"""More than it takes to be found."""

X, Y = regression(8)


def found(
    model: keras.Model, data: tf.data.Dataset, *callbacks: keras.callbacks.Callback
) -> Results:
    """What ranks are told, and how many steps after it happened.

    Raises:
        AssertionError: nothing was found.
    """
    start = int(model.optimizer.iterations.numpy())
    try:
        model.fit(data, verbose=0, callbacks=list(callbacks))
    except RuntimeMismatchError as error:
        steps = int(model.optimizer.iterations.numpy()) - start
        return {"message": np.array(str(error)), "late": np.array(steps - AT)}
    raise AssertionError("nothing was found")


# --- what ranks are fed ----------------------------------------------------------------------


def _fed(name: str, change: Callable[[np.ndarray, np.ndarray], object]) -> Case:
    """Rank 1 has other data in one step."""

    def case(place: Place) -> Results:
        with place.parallel():
            model = perceptron()

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for step in range(STEPS):
                x, y = X.copy(), Y.copy()
                if step == AT and place.rank == 1:
                    change(x, y)
                yield x, y

        kinds = (tf.TensorSpec(X.shape, tf.float64), tf.TensorSpec(Y.shape, tf.float64))
        return found(model, tf.data.Dataset.from_generator(batches, output_signature=kinds))

    case.__name__ = name
    return case


def _one_pixel(x: np.ndarray, y: np.ndarray) -> None:
    x[3, 1] += 1e-3


def _one_label(x: np.ndarray, y: np.ndarray) -> None:
    y[7] = 1.0


def _another_order(x: np.ndarray, y: np.ndarray) -> None:
    x[[0, 1]], y[[0, 1]] = x[[1, 0]], y[[1, 0]]


another_pixel = _fed("another_pixel", _one_pixel)
another_label = _fed("another_label", _one_label)
another_order_of_samples = _fed("another_order_of_samples", _another_order)


# --- what ranks hold -------------------------------------------------------------------------


def _changed(name: str, change: Callable[[keras.Model], object], *, split: bool = False) -> Case:
    """The last rank changes something of a model."""

    def case(place: Place) -> Results:
        with place.split() if split else place.parallel():
            model = keras.Sequential([perceptron(), layers.Dropout(0.1, seed=3)])
            model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=False)

        class Alone(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if batch == AT and place.rank == place.size - 1:
                    change(model)

        return found(model, tf.data.Dataset.from_tensors((X, Y)).repeat(STEPS), Alone())

    case.__name__ = name
    return case


def _learning_rate(model: keras.Model) -> None:
    model.optimizer.learning_rate = 0.5


def _bias(model: keras.Model) -> None:
    model.layers[0].get_layer("fc2").bias.assign([1.0, 2.0])


def _kernel(model: keras.Model) -> None:
    model.layers[0].get_layer("fc1").kernel.assign(np.zeros((6, 10)))


def _slot(model: keras.Model) -> None:
    (slot,) = (v for v in model.optimizer.variables if v.path.endswith("fc2_bias_momentum"))
    slot.assign([0.1, 0.1])


def _seed(model: keras.Model) -> None:
    model.layers[1].seed_generator.state.assign([1, 2])


def _past_keras(model: keras.Model) -> None:
    """As what goes wrong in memory does: no method of the variable is called."""
    (shard,) = model.layers[0].get_layer("fc2").bias._value.shards.values()
    shard.assign_add([0.5, 0.5])


another_learning_rate = _changed("another_learning_rate", _learning_rate)
another_bias = _changed("another_bias", _bias)
another_split_kernel = _changed("another_split_kernel", _kernel, split=True)
another_slot = _changed("another_slot", _slot)
another_seed = _changed("another_seed", _seed)
another_value_in_memory = _changed("another_value_in_memory", _past_keras)


def weights_loaded_by_one_rank(place: Place) -> Results:
    """Before anything is trained: each rank keeps its part of another value."""
    with place.split():
        model = perceptron()
    model.get_layer("fc1").kernel.assign(np.full((6, 10), 1.0 + place.rank))
    return found(model, tf.data.Dataset.from_tensors((X, Y)).repeat(STEPS))


def weights_frozen_by_one_rank(place: Place) -> Results:
    """All ranks compile the model again; one has frozen a layer before."""
    with place.parallel():
        model = perceptron()
    model.fit(X, Y, batch_size=8, verbose=0)
    model.get_layer("fc1").trainable = place.rank == 0
    model.compile("sgd", "mse", jit_compile=False)
    return found(model, tf.data.Dataset.from_tensors((X, Y)).repeat(STEPS))


_SAME_DATA = r"\. Every rank has to read the same data in the same order"
_ASSIGNED = r"Only rank {rank} assigned a value to '{name}:0' in train steps \d+ to \d+.*if rank"

MESSAGES: dict[Case, str] = {
    another_pixel: r"Ranks 0 and 1 were fed different batches in train step \d+: input 1 of 2 "
    r"\(float64\[8, 6\]\) differs in 1 of 8 samples, first in 3" + _SAME_DATA,
    another_label: r"input 2 of 2 \(float64\[8, 2\]\) differs in 1 of 8 samples, first in 7",
    another_order_of_samples: r"input 1 of 2 .* differs in 2 of 8 samples, first in 0",
    another_learning_rate: _ASSIGNED,
    another_bias: _ASSIGNED,
    another_split_kernel: _ASSIGNED,
    another_slot: _ASSIGNED,
    another_seed: _ASSIGNED,
    another_value_in_memory: r"'fc2/bias:0', which is replicated between them .* They "
    r"have come apart in train steps \d+ to \d+\..*please report it",
    weights_frozen_by_one_rank: r"'fc1/kernel' \(and 1 more\) is trained on rank 0 and not on rank "
    r"1\. Set `trainable` alike on every rank before `compile`",
    weights_loaded_by_one_rank: r"Ranks 0 and 1 have given '.*fc1/kernel:0' different values",
}
NAMES = {
    another_learning_rate: "adam/learning_rate",
    another_bias: "fc2/bias",
    another_split_kernel: "fc1/kernel",
    another_slot: "adam/fc2_bias_momentum",
    another_seed: "seed_generator/seed_generator_state",
}
CASES: list[Case] = [*MESSAGES]
BY_DAY: list[Case] = [
    another_pixel,
    another_learning_rate,
    another_split_kernel,
    another_value_in_memory,
    weights_frozen_by_one_rank,
    weights_loaded_by_one_rank,
]
ON_FOUR: list[Case] = [case for case in MESSAGES if case is not weights_loaded_by_one_rank]


def pattern(case: Case, num_ranks: int) -> re.Pattern[str]:
    """What the ranks of such a job are told."""
    name = re.escape(NAMES.get(case, ""))
    return re.compile(MESSAGES[case].replace("{rank}", f"{num_ranks - 1}").replace("{name}", name))
