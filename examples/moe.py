"""A mixture of experts: a GPT whose feed-forward layers are sixteen experts each.

Tokens go to the expert that their router prefers, as far as it has room. The layers are written
with einsums over all experts; who has which experts, and what goes where, is the plan's.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
from keras import layers, ops
from shipped_data import next_bytes

import tfpar as tap

CLUSTER = "rhino-m8"  # without it the plan is for the machine that runs the script
LENGTH, HIDDEN, HEADS, NUM_LAYERS, EXPERTS = 32, 128, 4, 2, 16


class Experts(layers.Layer):
    """Each token's feed-forward layer is that of one expert."""

    def __init__(self, experts: int, inner: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.experts, self.inner = experts, inner
        self.router = layers.Dense(experts, activation="softmax", name="router")

    def build(self, shape) -> None:
        self.router.build(shape)
        self.room = -(-5 * shape[1] // (4 * self.experts))  # a quarter more than its share
        self.wi = self.add_weight((self.experts, shape[-1], self.inner), name="wi")
        self.wo = self.add_weight((self.experts, self.inner, shape[-1]), name="wo")

    def call(self, x):
        gates = self.router(x)  # batch, tokens, experts
        chosen = ops.one_hot(ops.argmax(gates, axis=-1), self.experts, dtype=x.dtype)
        place = ops.sum((ops.cumsum(chosen, axis=1) - chosen) * chosen, axis=-1)
        places = ops.one_hot(ops.cast(place, "int32"), self.room, dtype=x.dtype)
        dispatch = ops.einsum("bte,btc->btec", chosen, places)
        h = ops.einsum("btec,btd->becd", dispatch, x)
        h = ops.gelu(ops.einsum("becd,edf->becf", h, self.wi))
        h = ops.einsum("becf,efd->becd", h, self.wo)
        return ops.einsum("btec,bte,becd->btd", dispatch, gates, h)


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(256, HIDDEN, name="tokens")(tokens)
    x = x + layers.Embedding(LENGTH, HIDDEN, name="positions")(ops.arange(LENGTH))
    for i in range(NUM_LAYERS):
        h = layers.LayerNormalization(name=f"block_{i}_ln1")(x)
        attention = layers.MultiHeadAttention(HEADS, HIDDEN // HEADS, name=f"block_{i}_attention")
        x = x + attention(h, h, use_causal_mask=True)
        h = layers.LayerNormalization(name=f"block_{i}_ln2")(x)
        x = x + Experts(EXPERTS, 4 * HIDDEN, name=f"block_{i}_experts")(h)
    logits = layers.Dense(256, name="head")(layers.LayerNormalization(name="ln")(x))
    model = keras.Model(tokens, logits, name="moe")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss)
    return model


def main() -> None:
    x, y = next_bytes(sequences=512, length=LENGTH)
    # So few steps are not worth the search that finds the best plan.
    with tap.auto_parallel([4], cluster=CLUSTER, search_seconds=600):
        model = build()
    history = model.fit(x, y, batch_size=64, epochs=3, verbose=0)
    plan = tap.plan_of(model)
    print(plan.summary())
    print(plan.explain("block_0_experts/wi"))
    print("losses:", *(f"{loss:.4f}" for loss in history.history["loss"]))


if __name__ == "__main__":
    main()
