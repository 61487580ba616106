"""A user's script, and how tests call the command."""

from __future__ import annotations

import shlex

from tfpar.cli.main import main

SCRIPT = """
import keras
import numpy as np
import tensorflow as tf

import sizes

assert __name__ == "train", __name__


def build(activation="relu"):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(sizes.HIDDEN, activation, name="fc1"),
            keras.layers.Dense(3, name="fc2"),
        ],
        name="mlp",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    return model


def arrays():
    return np.zeros((8, 6), "float32"), np.zeros(8, "int32")


def specs():
    return tf.TensorSpec((8, 6)), tf.TensorSpec((8,), "int32")


def both():
    return build(), arrays()


def no_model():
    return 3


def not_compiled():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)], name="raw")


def shapeless():
    model = keras.Sequential([keras.layers.Dense(2)], name="late")
    model.compile("sgd", "mse")
    return model


def raises():
    raise ValueError("out of\\nideas")


def needs(depth):
    return build()


def ends():
    raise SystemExit(3)


def open_batch():
    return tf.TensorSpec((None, 6)), tf.TensorSpec((None,), "int32")


def no_batch():
    return object()


def two_heads():
    x = keras.Input((6,), name="x")
    heads = [keras.layers.Dense(n, name=f"head_{n}")(x) for n in (2, 5)]
    model = keras.Model(x, heads)
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", ["mse", sparse], jit_compile=False)
    return model


def named_heads():
    x = {"x": keras.Input((6,), name="x")}
    heads = {n: keras.layers.Dense(2, name=n)(x["x"]) for n in ("b", "a")}
    model = keras.Model(x, heads)
    losses = {"a": "sparse_categorical_crossentropy", "b": "mse"}
    model.compile("sgd", losses, jit_compile=False)
    return model


def own_loss():
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.ActivityRegularization(0.1)(keras.layers.Dense(2)(x)))
    model.compile("sgd", jit_compile=False)
    return model


a_model = not_compiled()
"""


def tfpar(command: str) -> int:
    return main(shlex.split(command))
