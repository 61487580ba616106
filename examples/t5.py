"""A T5 that mends text: the encoder reads Python with holes, the decoder writes it whole.

Two towers of blocks, attention with biases by distance, one table of tokens for both. The layers
are written here, and nothing in them speaks of devices.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from keras import layers, ops
from machines import FOUR_CORES
from shipped_data import next_bytes

import tfpar as tap

LENGTH, HIDDEN, HEADS, NUM_LAYERS = 32, 64, 4, 2
HOLE, START = 256, 257  # beside the 256 bytes


class Attention(layers.Layer):
    """Of what `x` asks, over `memory` (by default `x` itself), with a bias for each distance."""

    def __init__(self, causal: bool = False, **kwargs) -> None:
        super().__init__(**kwargs)
        self.causal = causal

    def build(self, x_shape, memory_shape=None) -> None:
        def kernel(name):
            return self.add_weight((HIDDEN, HEADS, HIDDEN // HEADS), name=name)

        self.query, self.key, self.value = kernel("query"), kernel("key"), kernel("value")
        self.output_kernel = self.add_weight((HEADS, HIDDEN // HEADS, HIDDEN), name="output")
        self.distances = self.add_weight((2 * LENGTH - 1, HEADS), "zeros", name="distances")

    def call(self, x, memory=None):
        memory = x if memory is None else memory
        q = ops.einsum("btd,dhe->bhte", x, self.query) * (HIDDEN // HEADS) ** -0.5
        k = ops.einsum("bsd,dhe->bhse", memory, self.key)
        v = ops.einsum("bsd,dhe->bhse", memory, self.value)
        steps = np.arange(LENGTH)
        bias = ops.take(self.distances, steps[:, None] - steps + LENGTH - 1, axis=0)
        scores = ops.einsum("bhte,bhse->bhts", q, k) + ops.transpose(bias, (2, 0, 1))
        if self.causal:
            scores = scores - 1e9 * np.triu(np.ones((LENGTH, LENGTH), "float32"), 1)
        mixed = ops.einsum("bhts,bhse->bhte", ops.softmax(scores), v)
        return ops.einsum("bhte,hed->btd", mixed, self.output_kernel)


def norm(x, name: str):
    return layers.LayerNormalization(center=False, name=name)(x)


def block(x, name: str, memory=None):
    h = Attention(causal=memory is not None, name=f"{name}_self")(norm(x, f"{name}_norm1"))
    x = x + h
    if memory is not None:
        x = x + Attention(name=f"{name}_cross")(norm(x, f"{name}_norm2"), memory)
    h = norm(x, f"{name}_norm3")
    gate = layers.Dense(2 * HIDDEN, "gelu", use_bias=False, name=f"{name}_wi_0")(h)
    h = gate * layers.Dense(2 * HIDDEN, use_bias=False, name=f"{name}_wi_1")(h)
    return x + layers.Dense(HIDDEN, use_bias=False, name=f"{name}_wo")(h)


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    table = layers.Embedding(258, HIDDEN, name="tokens")
    holes = keras.Input((LENGTH,), dtype="int32", name="with_holes")
    before = keras.Input((LENGTH,), dtype="int32", name="so_far")
    memory = table(holes)
    for i in range(NUM_LAYERS):
        memory = block(memory, f"encoder_{i}")
    memory = norm(memory, "encoder_norm")
    x = table(before)
    for i in range(NUM_LAYERS):
        x = block(x, f"decoder_{i}", memory)
    logits = layers.Dense(258, use_bias=False, name="head")(norm(x, "decoder_norm"))
    model = keras.Model([holes, before], logits, name="t5")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(2e-3), loss)
    return model


def text_with_holes(sequences: int):
    """(Text with a hole of five bytes in each eighth, text that begins one later), and the text."""
    text, _ = next_bytes(sequences, LENGTH)
    holes = text.copy()
    starts = np.random.default_rng(0).integers(0, LENGTH - 5, (2, sequences))
    for start in starts:
        np.put_along_axis(holes, start[:, None] + np.arange(5), HOLE, axis=1)
    before = np.concatenate([np.full((sequences, 1), START, "int32"), text[:, :-1]], axis=1)
    return {"with_holes": holes, "so_far": before}, text


def main() -> None:
    x, y = text_with_holes(512)
    # So few steps are not worth the search that finds the best plan.
    with tap.auto_parallel([4], cluster=FOUR_CORES, search_seconds=600):
        model = build()
    history = model.fit(x, y, batch_size=16, epochs=4, verbose=0)
    print(tap.plan_of(model).summary())
    print("losses:", *(f"{loss:.4f}" for loss in history.history["loss"]))


if __name__ == "__main__":
    main()
