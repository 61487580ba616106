"""The models of the benchmarks, in plain Keras."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers


def gpt(
    vocabulary: int = 8000,
    length: int = 128,
    hidden: int = 256,
    heads: int = 4,
    num_layers: int = 4,
) -> keras.Model:
    """A decoder-only transformer with learned positions, pre-normalised."""
    tokens = keras.Input((length,), dtype="int32")
    positions = keras.ops.arange(length)
    x = layers.Embedding(vocabulary, hidden, name="tokens")(tokens)
    x = x + layers.Embedding(length, hidden, name="positions")(positions)
    for i in range(num_layers):
        h = layers.LayerNormalization(name=f"block_{i}_ln1")(x)
        h = layers.MultiHeadAttention(heads, hidden // heads, name=f"block_{i}_attention")(
            h, h, use_causal_mask=True
        )
        x = x + h
        h = layers.LayerNormalization(name=f"block_{i}_ln2")(x)
        h = layers.Dense(4 * hidden, activation="gelu", name=f"block_{i}_fc1")(h)
        x = x + layers.Dense(hidden, name=f"block_{i}_fc2")(h)
    x = layers.LayerNormalization(name="ln")(x)
    return keras.Model(tokens, layers.Dense(vocabulary, name="head")(x))


def wide(classes: int = 50_000) -> keras.Model:
    """A small residual MLP body with a very wide classifier."""
    inputs = keras.Input((784,))
    x = layers.Dense(512, activation="relu", name="stem")(inputs)
    for i in range(2):
        h = layers.Dense(512, activation="relu", name=f"block_{i}_fc1")(x)
        x = x + layers.Dense(512, name=f"block_{i}_fc2")(h)
    return keras.Model(inputs, layers.Dense(classes, name="head")(x))


def gpt_batch(batch: int = 8, length: int = 128, vocabulary: int = 8000):
    tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1)).astype("int32")
    return tokens[:, :-1], tokens[:, 1:]


def wide_batch(batch: int = 32, classes: int = 50_000):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, 784)).astype("float32")
    return x, rng.integers(0, classes, batch).astype("int32")


def compile_model(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    return model


GPT_MEGATRON = {
    r".*attention/(query|key|value)/kernel": (None, "model", None),
    r".*attention/(query|key|value)/bias": ("model", None),
    r".*attention/attention_output/kernel": ("model", None, None),
    r".*fc1/kernel": (None, "model"),
    r".*fc1/bias": ("model",),
    r".*fc2/kernel": ("model", None),
    r"tokens/embeddings": ("model", None),
    r"head/kernel": (None, "model"),
    r"head/bias": ("model",),
}
"""Megatron's layout: heads, the MLP's inner dim and the vocabulary split."""

WIDE_HEAD = {
    r"head/kernel": (None, "model"),
    r"head/bias": ("model",),
    r"stem/kernel": (None, "model"),
    r"block_.*_fc1/kernel": (None, "model"),
}
"""The classes split, and the small body column and row in turn."""


def layout(model: str):
    """The constraints of the `model` contenders."""
    import tfpar as tap

    return tap.from_layout_map(WIDE_HEAD if model == "wide" else GPT_MEGATRON)
