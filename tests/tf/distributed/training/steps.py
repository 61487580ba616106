"""Steps of the user's own, and the comparison that users may make themselves."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfpar as tap
from tests.tf.distributed.training.place import (
    COLUMNS,
    Case,
    Place,
    Results,
    floats,
    numbers,
    perceptron,
    regression,
    trained,
)

X, Y = regression(20)


class TwoLosses(keras.Model):
    """Its loss has a penalty, and it counts in a variable of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = keras.layers.Dense(10, "tanh", name="fc1")
        self.fc2 = keras.layers.Dense(2, name="fc2")
        self.norms = keras.metrics.Mean("norm")

    def call(self, x):
        return self.fc2(self.fc1(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            norm = tf.norm(self.fc1.kernel)
            total = loss + 0.1 * norm
        gradients = tape.gradient(total, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.norms.update_state(norm)
        return {"loss": loss, "norm": self.norms.result()}


def a_train_step_of_the_model(place: Place) -> Results:
    with place.split():
        model = TwoLosses()
        model.compile("adam")
    return trained(model, X, Y, batch_size=8, epochs=2, shuffle=False)


def functions_of_tensors(place: Place) -> Results:
    with place.parallel():
        weight = tf.Variable(numbers(6, 2), name="weight")

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.tanh(x @ weight) - y) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss, x @ weight

        run = tap.function(step) if place.size > 1 else tf.function(step)
    losses, outputs = [], np.zeros(0)
    for n in (8, 8, 5):
        loss, outputs = run(tf.constant(X[:n]), tf.constant(Y[:n]))
        losses.append(loss)
    return {
        "losses": floats(losses),
        "outputs": np.asarray(outputs),
        "weight": np.array(weight.numpy()),
    }


def an_existing_model(place: Place) -> Results:
    model = perceptron("adam")
    trained(model, X, Y, batch_size=8, shuffle=False)
    if place.size > 1:
        tap.parallelize(model, [1, place.size], COLUMNS)
    return trained(model, X, Y, batch_size=8, shuffle=False)


def verification(place: Place) -> Results:
    """`verify` finds no difference, and leaves the model as it was."""
    with place.split():
        model = perceptron("adam")
    if place.size > 1:
        report = tap.verify(model, X, Y, batch_size=8)
        assert report, str(report)
    return trained(model, X, Y, batch_size=8, shuffle=False)


CASES: list[Case] = [
    a_train_step_of_the_model,
    functions_of_tensors,
    an_existing_model,
    verification,
]
