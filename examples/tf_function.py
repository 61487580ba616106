"""No Keras at all: variables, a gradient tape, and a function of tensors.

`tap.function` takes the place of `tf.function`. Tensors whose first dimension is the batch's are
split; how variables lie is searched.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
import tensorflow as tf
from machines import FOUR_CORES
from shipped_data import digits

import tfpar as tap

RATE, MOMENTUM = 0.1, 0.9


class Network(tf.Module):
    """Two layers, and momentum for each weight."""

    def __init__(self) -> None:
        super().__init__(name="network")
        rng = np.random.default_rng(0)
        self.w1 = self.weight(rng.normal(size=(64, 512)) / 8, "w1")
        self.b1 = self.weight(np.zeros(512), "b1")
        self.w2 = self.weight(rng.normal(size=(512, 10)) / 23, "w2")
        self.weights = [self.w1, self.b1, self.w2]
        self.momenta = [tf.Variable(tf.zeros_like(w), name="momentum") for w in self.weights]

    def weight(self, value: np.ndarray, name: str) -> tf.Variable:
        return tf.Variable(value.astype("float32"), name=name)

    def __call__(self, x):
        return tf.nn.relu(x @ self.w1 + self.b1) @ self.w2


def train_step(network: Network, x, y):
    with tf.GradientTape() as tape:
        logits = network(x)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
    gradients = tape.gradient(loss, network.weights)
    for weight, momentum, gradient in zip(network.weights, network.momenta, gradients, strict=True):
        momentum.assign(MOMENTUM * momentum + gradient)
        weight.assign_sub(RATE * momentum)
    return loss


def epochs(step, count: int) -> list[float]:
    """The mean loss of each."""
    images, labels = digits()
    x, y = images.reshape(-1, 64)[:1792], labels[:1792]
    return [
        float(np.mean([step(x[i : i + 128], y[i : i + 128]) for i in range(0, len(x), 128)]))
        for _ in range(count)
    ]


def main() -> None:
    with tap.auto_parallel([4], cluster=FOUR_CORES):
        network = Network()

        @tap.function
        def step(x, y):
            return train_step(network, x, y)

    losses = epochs(step, 5)
    print(tap.plan_of(step).summary())

    plain = Network()
    alone = epochs(tf.function(lambda x, y: train_step(plain, x, y)), 5)
    print("losses on the mesh:  ", *(f"{loss:.4f}" for loss in losses))
    print("losses on one device:", *(f"{loss:.4f}" for loss in alone))


if __name__ == "__main__":
    main()
