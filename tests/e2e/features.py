"""What the tests of features share: small models, random samples, both ways to train."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

import tfpar as tap
from tests.equivalence import assert_equivalent

MESH = tap.split([2, 2])
COLUMN = [tap.shard("fc1/kernel", dim=1, axis="model")]
rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def i(high, *shape):
    return rng.integers(0, high, shape).astype("int32")


def compiled(inputs, outputs, optimizer="sgd", loss="mse", **arguments):
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, loss, jit_compile=False, **arguments)
    return model


def same(build, data, constraints=COLUMN, mesh=MESH, **arguments):
    return assert_equivalent(build, data, mesh, constraints, **{"batch_size": 4, **arguments})


def perceptron(optimizer="adam", **arguments):
    x = keras.Input((6,), **arguments)
    h = layers.Dense(10, "tanh", name="fc1")(x)
    h = layers.LayerNormalization()(h)
    return compiled(x, layers.Dense(2, name="head")(h), optimizer=optimizer)
