"""Where a case runs, and what it gives: numbers by name, for one device and for each rank alike."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

import tfpar as tap
from tfpar.tf.keras.adapter import parallel_model

Results = dict[str, np.ndarray]

SEED = 7


@dataclasses.dataclass(frozen=True)
class Place:
    """One device, or one rank among `size`.

    Attributes:
        folder: for the files of a case; all ranks share it.
    """

    folder: Path
    size: int = 1
    rank: int = 0

    def parallel(
        self,
        constraints: Sequence[Any] = (),
        mesh: Sequence[int] | Mapping[str, int] | None = None,
        planner=None,
        **options: Any,
    ) -> contextlib.AbstractContextManager:
        """The ranks' mesh for what is built inside, where there is one."""
        if self.size == 1:
            return contextlib.nullcontext()
        return tap.auto_parallel(mesh or [self.size], constraints, planner=planner, **options)

    def split(self) -> contextlib.AbstractContextManager:
        """`parallel`, with the first layer of a `perceptron` split."""
        return self.parallel(COLUMNS, [1, self.size])


Case = Callable[[Place], Results]


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """Keras's default dtype, for what is built inside."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def run(case: Case, place: Place) -> Results:
    """The results of a case; in double precision, where roundings cannot hide a mistake."""
    place.folder.mkdir(parents=True, exist_ok=True)
    keras.utils.clear_session(free_memory=False)  # layers are named alike, whatever ran before
    keras.utils.set_random_seed(SEED)
    with precision("float64"):
        return case(place)


class StepLosses(keras.callbacks.Callback):
    """The loss after each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(logs["loss"])


def trained(model: keras.Model, *data: Any, callbacks: Sequence[Any] = (), **arguments) -> Results:
    """Fit, and give the losses of all steps, the history and the weights."""
    if parallel_model(model) is None:
        model.run_eagerly = True  # the same ops: tracing takes longer than a few small steps
    losses = StepLosses()
    history = model.fit(*data, verbose=0, callbacks=[*callbacks, losses], **arguments).history
    return {"losses": floats(losses.values), **lines(history), **weights(model)}


def lines(history: dict[str, Any]) -> Results:
    return {f"history/{name}": floats(values) for name, values in history.items()}


def weights(model: keras.Model) -> Results:
    return {
        f"weights/{i} {w.path}": np.array(value)
        for i, (w, value) in enumerate(zip(model.weights, model.get_weights(), strict=True))
    }


def floats(values: Any) -> np.ndarray:
    """In the precision that they were computed in."""
    return np.asarray(values, keras.config.floatx())


def collectives(model: keras.Model, kind: str = "train") -> list[tuple[str, int]]:
    """Kind and bytes of each collective in a step of a parallel model."""
    state = parallel_model(model)
    assert state is not None
    partitioned = state.executables[kind].partitioned
    return [(name, size) for name, _, size in partitioned.collectives()]


def is_split(variable: keras.Variable) -> bool:
    """Whether this rank stores a part of the weight only."""
    (shard,) = variable._value.shards.values()
    return shard.shape.num_elements() < variable._value.shape.num_elements()


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


COLUMNS = [tap.shard("fc1/kernel", dim=1, axis="model")]
"""Splits the first layer of `perceptron` by columns, and with it the second by rows."""


def perceptron(optimizer: Any = "sgd", **arguments: Any) -> keras.Model:
    """6 inputs, 2 outputs."""
    inputs = keras.Input((6,))
    h = layers.Dense(10, "tanh", name="fc1")(inputs)
    model = keras.Model(inputs, layers.Dense(2, name="fc2")(h))
    model.compile(optimizer, "mse", jit_compile=False, **arguments)
    return model


def regression(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Data of `perceptron`."""
    return numbers(n, 6), numbers(n, 2)
