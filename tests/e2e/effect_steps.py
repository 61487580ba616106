"""Random train steps of Keras, and functions, that read and assign a few variables as they train.

Python writes the statements one after the other, and so TensorFlow runs those that touch one
variable; some wait, besides, for another statement by a control edge.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfpar as tap
from tfpar.tf.keras import parallel_model
from tfpar.tf.runtime import Executable

BATCH, WIDTH, STATEMENTS, NUM_VARIABLES = 8, 4, 9, 4


@dataclasses.dataclass(frozen=True)
class Statement:
    """One statement of a step.

    Attributes:
        kind: "read", "train", or the method of a variable that assigns.
        variable: by number.
        operands: of the values that there are by then, those that are used, as parts of 1.
        after: the statement that this one waits for, if any.
        through: what runs after that in its place: itself, or a group or a constant behind it.
    """

    kind: str
    variable: int
    operands: tuple[float, float]
    after: int | None
    through: str


def statements(seed: int) -> list[Statement]:
    """The same for one seed, in every process."""
    draw = random.Random(seed)
    kinds = ["read"] * 4 + ["assign", "assign_add", "assign_sub"] * 2
    made = [
        Statement(
            draw.choice(kinds),
            draw.randrange(NUM_VARIABLES),
            (draw.random(), draw.random()),
            draw.randrange(i) if i and draw.random() < 0.5 else None,
            draw.choice(["itself", "group", "constant"]),
        )
        for i in range(STATEMENTS)
    ]
    at = draw.randrange(1, STATEMENTS)
    made[at] = dataclasses.replace(made[at], kind="train")
    return made


def run(
    made: Sequence[Statement], state: Sequence[Any], loss: tf.Tensor, train: Callable[..., Any]
) -> dict[str, tf.Tensor]:
    """Run statements, and return the loss and what they read.

    Args:
        train: updates the weights, at a rate; what it returns is done with the updates.
    """
    values, reads = [tf.constant(0.5), tf.constant(1.0), loss], {"loss": loss}
    done: list[Any] = []
    for i, statement in enumerate(made):
        left, right = (values[int(part * len(values))] for part in statement.operands)
        variable = state[statement.variable]
        with tf.control_dependencies(_waited_for(statement, done)):
            if statement.kind == "train":
                done.append(train(0.05 * (1.0 + tf.tanh(tf.identity(state[0].value)))))
            elif statement.kind == "read":
                reads[f"read_{i}"] = value = tf.identity(variable.value)
                values.append(tf.tanh(value))
                done.append(value)
            else:
                value = tf.tanh(left * 0.5 + right)
                getattr(variable, statement.kind)(value)
                done.append(value)
    return reads


def _waited_for(statement: Statement, done: Sequence[Any]) -> list[Any]:
    if statement.after is None:
        return []
    if statement.through == "itself":
        return [done[statement.after]]
    with tf.control_dependencies([done[statement.after]]):
        return [tf.no_op() if statement.through == "group" else tf.constant(1.0)]


class Block(keras.layers.Dense):
    """A layer in which something can be computed once more in the backward pass."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(2.0 * tf.tanh(super().call(x)))


class Effectful(keras.Model):
    """A perceptron that runs statements beside its training."""

    def __init__(self, seed: int, *args: Any) -> None:
        super().__init__(*args)
        self.made = statements(seed)
        self.state = [
            self.add_weight((), keras.initializers.Constant(0.1 * i), trainable=False, name=f"c{i}")
            for i in range(NUM_VARIABLES)
        ]

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)

        def train(rate: tf.Tensor) -> tf.Tensor:
            self.optimizer.apply([rate * g for g in gradients], self.trainable_weights)
            return rate

        return run(self.made, self.state, loss, train)


def model_of(seed: int, jit_compile: bool) -> keras.Model:
    """The model of a seed, compiled."""
    keras.utils.set_random_seed(seed)
    h = inputs = keras.Input((WIDTH,))
    for i in range(3):
        h = Block(WIDTH, name=f"block_{i}")(h)
    model = Effectful(seed, inputs, keras.layers.Dense(1, name="head")(h))
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    return model


def data_of(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(BATCH, WIDTH)), rng.normal(size=(BATCH, 1))
    return x.astype("float32"), y.astype("float32")


Run = tuple[np.ndarray, Executable | None]
"""What a step gives, step by step, and the program that ran if tfpar made it."""


def run_fit(seed: int, steps: int, **options: Any) -> Run:
    """Train by `fit`, whose logs are the results; by plain Keras unless `options` are given."""
    jit_compile = options.pop("xla", False)
    alone = not options
    if alone:
        model = model_of(seed, jit_compile)
    else:
        with tap.auto_parallel(options.pop("mesh"), planner=None, verbose=0, **options):
            model = model_of(seed, jit_compile)
    x, y = data_of(seed)
    history = model.fit(x, y, batch_size=BATCH, epochs=steps, verbose=0, shuffle=False).history
    results = np.array([history[name] for name in sorted(history)], np.float64).T
    return results, None if alone else parallel_model(model).executables["train"]


def run_function(seed: int, steps: int, **options: Any) -> Run:
    """Call a function that trains and returns the results; a `tf.function` unless `options` are
    given."""
    made, rng, (x, y) = statements(seed), np.random.default_rng(seed), data_of(seed)
    starts = [rng.normal(size=(WIDTH, n)).astype("float32") / 2 for n in (*[WIDTH] * 3, 1)]

    def body() -> Callable[..., dict[str, tf.Tensor]]:
        weights = [keras.Variable(start) for start in starts]
        state = [keras.Variable(0.1 * i, trainable=False) for i in range(NUM_VARIABLES)]

        def step(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
            values = [weight.value for weight in weights]
            with tf.GradientTape() as tape:
                hidden = x
                for i, value in enumerate(values[:-1]):
                    with tf.name_scope(f"block_{i}"):
                        hidden = tf.tanh(2.0 * tf.tanh(hidden @ value))
                loss = tf.reduce_mean((hidden @ values[-1] - y) ** 2)
            gradients = tape.gradient(loss, values)

            def train(rate: tf.Tensor) -> tf.Tensor:
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.assign_sub(rate * gradient)
                return rate

            return run(made, state, loss, train)

        return step

    jit_compile = options.pop("xla", False)
    alone = not options
    if alone:
        step = tf.function(body(), jit_compile=jit_compile)
    else:
        with tap.auto_parallel(options.pop("mesh"), planner=None, verbose=0, **options):
            step = tap.function(body(), jit_compile=jit_compile)
    found = [step(x, y) for _ in range(steps)]
    results = [[float(logs[name]) for name in sorted(logs)] for logs in found]
    return np.array(results), None if alone else step.executables[-1]
