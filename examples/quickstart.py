"""A ConvNet and a small GPT, beside one device: the quickstart.

Both train on four ranks in one process, with plans that are searched, and plainly on one device;
the losses stand side by side. What the search decides depends on this machine's cores, which the
ranks share.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers
from shipped_data import digits, next_bytes

import tfpar as tap

MESH = tap.split([2, 2])  # 4 ranks: 2 workers of 2 devices

# --- a ConvNet on digits ----------------------------------------------------------------


def build_convnet() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.2),
            layers.Dense(10, activation="softmax"),
        ],
        name="convnet",
    )
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


# --- a GPT on the standard library's text -----------------------------------------------

LENGTH, VOCABULARY, HIDDEN, HEADS, NUM_LAYERS = 64, 256, 64, 4, 2


def build_gpt() -> keras.Model:
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, HIDDEN, name="tokens")(tokens)
    x = x + layers.Embedding(LENGTH, HIDDEN, name="positions")(keras.ops.arange(LENGTH))
    for i in range(NUM_LAYERS):
        h = layers.LayerNormalization(name=f"block_{i}_ln1")(x)
        attention = layers.MultiHeadAttention(HEADS, HIDDEN // HEADS, name=f"block_{i}_attention")
        x = x + attention(h, h, use_causal_mask=True)
        h = layers.LayerNormalization(name=f"block_{i}_ln2")(x)
        h = layers.Dense(4 * HIDDEN, activation="gelu", name=f"block_{i}_fc1")(h)
        x = x + layers.Dense(HIDDEN, name=f"block_{i}_fc2")(h)
    logits = layers.Dense(VOCABULARY, name="head")(layers.LayerNormalization(name="ln")(x))
    model = keras.Model(tokens, logits, name="gpt")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(3e-3, global_clipnorm=1.0), loss)
    return model


# --- side by side -----------------------------------------------------------------------


def compare(name, build, data, **fit_arguments) -> None:
    print(f"\n=== {name}")
    with tap.auto_parallel(MESH):  # no constraints: the search decides
        model = build()
    history = model.fit(*data, verbose=0, **fit_arguments).history
    print(tap.plan_of(model))

    alone = build().fit(*data, verbose=0, **fit_arguments).history
    print(f"{'epoch':>6} {'loss on the mesh':>18} {'on one device':>18}")
    for epoch, losses in enumerate(zip(history["loss"], alone["loss"], strict=True)):
        print(f"{epoch:>6} {losses[0]:>18.6f} {losses[1]:>18.6f}")
    np.testing.assert_allclose(history["loss"], alone["loss"], rtol=1e-2)


def main() -> None:
    images, labels = digits()
    compare(
        "ConvNet on digits",
        build_convnet,
        (images[:1500], labels[:1500]),
        batch_size=100,
        epochs=3,
        shuffle=False,
        validation_data=(images[1500:], labels[1500:]),
    )
    compare(
        "GPT on Python's standard library",
        build_gpt,
        next_bytes(sequences=256, length=LENGTH),
        batch_size=32,
        epochs=3,
        shuffle=False,
    )
    print("\nThe same losses: what trains on the mesh is the model, not an approximation of it.")


if __name__ == "__main__":
    main()
