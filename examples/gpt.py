"""A GPT on real text: bytes of Python's own library, on four ranks.

The model is plain Keras, and its plan is searched. Afterwards it writes some Python of its own,
under the same plan.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from keras import layers
from machines import FOUR_CORES
from shipped_data import next_bytes

import tfpar as tap

LENGTH, HIDDEN, HEADS, NUM_LAYERS = 64, 128, 4, 4


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(256, HIDDEN, name="tokens")(tokens)
    x = x + layers.Embedding(LENGTH, HIDDEN, name="positions")(keras.ops.arange(LENGTH))
    for i in range(NUM_LAYERS):
        h = layers.LayerNormalization(name=f"block_{i}_ln1")(x)
        attention = layers.MultiHeadAttention(HEADS, HIDDEN // HEADS, name=f"block_{i}_attention")
        x = x + attention(h, h, use_causal_mask=True)
        h = layers.LayerNormalization(name=f"block_{i}_ln2")(x)
        h = layers.Dense(4 * HIDDEN, activation="gelu", name=f"block_{i}_fc1")(h)
        x = x + layers.Dense(HIDDEN, name=f"block_{i}_fc2")(h)
    logits = layers.Dense(256, name="head")(layers.LayerNormalization(name="ln")(x))
    model = keras.Model(tokens, logits, name="gpt")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(2e-3, global_clipnorm=1.0), loss)
    return model


def write(model: keras.Model, text: bytes, num_bytes: int) -> bytes:
    """The text, and bytes that are drawn as the model holds them likely."""
    rng = np.random.default_rng(0)
    for _ in range(num_bytes):
        window = np.frombuffer(text[-LENGTH:].rjust(LENGTH), np.uint8)[None]
        odds = np.exp(1.5 * model.predict_on_batch(window)[0, -1].astype("float64"))
        text += bytes([rng.choice(256, p=odds / odds.sum())])
    return text


def main() -> None:
    x, y = next_bytes(sequences=512, length=LENGTH)
    # So few steps are not worth the search that finds the best plan.
    with tap.auto_parallel([4], cluster=FOUR_CORES, search_seconds=600):
        model = build()
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    print(tap.plan_of(model).summary())
    print("losses:", *(f"{loss:.4f}" for loss in history.history["loss"]))
    print(write(model, b"    def ", 80).decode("ascii", errors="replace"))


if __name__ == "__main__":
    main()
