"""Tiny models on small meshes: a few for each way to split work, and each kind of collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfpar as tap

SAMPLES, WIDTH, CLASSES, LENGTH, VOCABULARY, SIZE = 16, 8, 4, 6, 12, 8

rng = np.random.default_rng(0)
VECTORS = rng.normal(size=(SAMPLES, WIDTH)).astype("float32")
LABELS = rng.integers(0, CLASSES, SAMPLES)
TOKENS = rng.integers(0, VOCABULARY, (SAMPLES, LENGTH))
SERIES = rng.normal(size=(SAMPLES, LENGTH, WIDTH)).astype("float32")
IMAGES = rng.normal(size=(SAMPLES // 4, SIZE, SIZE, 2)).astype("float32")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A model, its batch, and how both are split."""

    build: Callable[[], keras.Model]
    data: tuple[np.ndarray, np.ndarray]
    mesh: Any = (2,)
    constraints: Sequence[tap.Constraint] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def model(self) -> keras.Model:
        keras.utils.set_random_seed(0)
        mesh = self.mesh if isinstance(self.mesh, tap.Mesh) else tap.split(list(self.mesh))
        with tap.auto_parallel(mesh, self.constraints, planner=None, verbose=0, **self.options):
            return self.build()


def classifier(inputs: Any, outputs: Any, optimizer: Any = "adam") -> keras.Model:
    model = keras.Model(inputs, layers.Dense(CLASSES, name="head")(outputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def perceptron(optimizer: Any = "adam") -> keras.Model:
    inputs = keras.Input((WIDTH,))
    h = layers.Dense(16, "gelu", name="fc1")(inputs)
    return classifier(inputs, layers.Dense(WIDTH, name="fc2")(h), optimizer)


def normalized() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    h = layers.BatchNormalization(name="norm")(layers.Dense(16, "relu", name="fc1")(inputs))
    return classifier(inputs, layers.Dropout(0.2, seed=3)(h))


def clipped() -> keras.Model:
    return perceptron(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1))


def convolution() -> keras.Model:
    inputs = keras.Input((SIZE, SIZE, 2))
    x = layers.Rescaling(2.0, name="pixels")(inputs)
    x = layers.Conv2D(4, 3, padding="same", name="conv")(x)
    x = layers.MaxPooling2D(3, 2, padding="same", name="pool")(x)
    x = layers.BatchNormalization(name="norm")(layers.Conv2D(4, 3, padding="same")(x))
    return classifier(inputs, layers.GlobalAveragePooling2D()(layers.ReLU()(x)))


def attention() -> keras.Model:
    inputs = keras.Input((LENGTH, WIDTH))
    h = layers.LayerNormalization(name="ln1")(inputs)
    x = inputs + layers.MultiHeadAttention(2, WIDTH // 2, name="attention")(h, h)
    h = layers.Dense(16, "gelu", name="fc1")(layers.LayerNormalization(name="ln2")(x))
    return classifier(inputs, layers.GlobalAveragePooling1D()(x + layers.Dense(WIDTH)(h)))


def lookup() -> keras.Model:
    ids = keras.Input((LENGTH,), dtype="int32")
    return classifier(
        ids, layers.GlobalAveragePooling1D()(layers.Embedding(VOCABULARY, WIDTH, name="table")(ids))
    )


def recurrent() -> keras.Model:
    inputs = keras.Input((LENGTH, WIDTH))
    return classifier(inputs, layers.GRU(WIDTH, use_cudnn=False, name="gru")(inputs))


class Pieces(layers.Layer):
    """Cuts, pads, turns and joins along the dim that is split."""

    def call(self, x: Any) -> Any:
        first, second = x[:, :2], x[:, 2:]
        x = ops.concatenate([second, first], axis=1)
        x = ops.pad(x, [[0, 0], [1, 1], [0, 0]]) + ops.flip(ops.pad(x, [[0, 0], [2, 0], [0, 0]]), 1)
        return ops.cumsum(x, axis=1)


def pieces() -> keras.Model:
    inputs = keras.Input((LENGTH, WIDTH))
    x = Pieces(name="pieces")(layers.Dense(WIDTH, "tanh", name="fc1")(inputs))
    x = ops.max(x, axis=1) + ops.softmax(x, axis=1)[:, 1]
    return classifier(inputs, x)


class Experts(layers.Layer):
    """Each of as many experts as positions transforms its own."""

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[1], shape[2], shape[2]), name="w")

    def call(self, x: Any) -> Any:
        return ops.einsum("egm,emh->egh", ops.transpose(x, (1, 0, 2)), self.w)


def experts() -> keras.Model:
    inputs = keras.Input((LENGTH, WIDTH))
    x = Experts(name="experts")(layers.Dense(WIDTH, "tanh", name="fc1")(inputs))
    return classifier(inputs, ops.mean(ops.tanh(ops.transpose(x, (1, 0, 2))), axis=1))


class Outside(layers.Layer):
    """Runs what no rank but the first may run, for all."""

    def call(self, x: Any) -> Any:
        found = tf.numpy_function(np.tanh, [x], x.dtype)
        return x + tf.ensure_shape(found, x.shape)


def outside() -> keras.Model:
    inputs = keras.Input(batch_shape=(SAMPLES, WIDTH))
    return classifier(inputs, layers.Dense(WIDTH, "tanh")(Outside(name="outside")(inputs)))


COLUMNS = tap.shard("fc1/kernel", dim=1, axis="model")
ROWS = tap.shard("fc2/kernel", dim=0, axis="model")
BY_BATCH = tap.batch("data")
LAYOUTS: dict[str, Layout] = {
    "data": Layout(normalized, (VECTORS, LABELS), (4,)),
    "uneven": Layout(normalized, (VECTORS[:11], LABELS[:11]), (4,)),
    "tensor": Layout(perceptron, (VECTORS, LABELS), (2, 2), [COLUMNS, ROWS]),
    "classes": Layout(
        perceptron, (VECTORS, LABELS), (2, 2), [tap.shard("head/kernel", 1, "model")]
    ),
    "zero": Layout(
        perceptron, (VECTORS, LABELS), (2,), [BY_BATCH, tap.shard(".*kernel", 0, "data")]
    ),
    "clipped": Layout(clipped, (VECTORS, LABELS), (2, 2), [COLUMNS]),
    "convolution": Layout(
        convolution,
        (IMAGES, LABELS[: len(IMAGES)]),
        tap.Mesh(("data", "rows"), (2, 2)),
        [tap.shard_output("pixels", 1, "rows")],
    ),
    "attention": Layout(
        attention,
        (SERIES, LABELS),
        (2, 2),
        [COLUMNS, tap.shard(".*attention/(query|key|value)/kernel", 1, "model")],
    ),
    "sequence": Layout(
        attention,
        (SERIES, LABELS),
        (1, 2),
        [COLUMNS, *(tap.shard_output(f"ln{i}", 1, "model") for i in (1, 2))],
    ),
    "lookup": Layout(lookup, (TOKENS, LABELS), (2, 2), [tap.shard("table/embeddings", 0, "model")]),
    "recurrent": Layout(
        recurrent, (SERIES, LABELS), (2, 2), [tap.shard("gru/.*/kernel", 1, "model")]
    ),
    "pieces": Layout(pieces, (SERIES, LABELS), (1, 2), [tap.shard_output("fc1", 1, "model")]),
    "experts": Layout(
        experts, (SERIES, LABELS), (2,), [BY_BATCH, tap.shard("experts/w", 0, "data")]
    ),
    "outside": Layout(outside, (VECTORS, LABELS)),
    "stages": Layout(
        perceptron,
        (VECTORS, LABELS),
        (2,),
        options={"pipeline": tap.Pipeline(stages=2, microbatches=2)},
    ),
}
