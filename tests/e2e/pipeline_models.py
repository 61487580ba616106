"""Small models of the kinds that pipelines have to cut: chains, skips, ties, towers, loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.e2e.test_patterns import MoE, block

LENGTH, VOCABULARY, WIDTH = 4, 12, 8
SAMPLES = 11
"""Two batches of 6 and 5, both ragged in four microbatches."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and what it is trained on.

    Attributes:
        data: x, y and sample weights, if there are any.
        rtol: of the updates of weights.
        policy: the dtype policy that it is built under.
    """

    build: Callable[[], keras.Model]
    data: tuple[Any, ...]
    rtol: float = 2e-3
    policy: str = "float32"


def mlp() -> keras.Model:
    x = inputs = keras.Input((6,))
    for _ in range(3):
        x = layers.Dense(10, "tanh")(x)
    return _compiled(inputs, layers.Dense(2)(x), "mse", metrics=["mae"])


def gpt() -> keras.Model:
    """With dropout, weight decay, and clipping by the global norm."""
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 16)(ids)
    x = x + layers.Embedding(LENGTH, 16)(ops.arange(LENGTH))
    x = layers.Dropout(0.2, seed=5)(block(x, 0, use_bias=False))
    optimizer = keras.optimizers.AdamW(1e-3, global_clipnorm=0.5)
    return _compiled(ids, layers.Dense(VOCABULARY)(x), _entropy(), optimizer)


def _attended(x: Any, memory: Any, **arguments: Any) -> Any:
    return x + layers.MultiHeadAttention(2, WIDTH // 2)(x, memory, **arguments)


def t5() -> keras.Model:
    """Encoder and decoder, which share a table; all decoder blocks attend to the encoder."""
    source = keras.Input((LENGTH,), dtype="int32", name="source")
    target = keras.Input((LENGTH,), dtype="int32", name="target")
    table = layers.Embedding(VOCABULARY, WIDTH)
    memory = table(source)
    memory = layers.RMSNormalization()(_attended(memory, memory))
    x = table(target)
    for _ in range(2):
        x = _attended(_attended(x, x, use_causal_mask=True), memory)
        x = layers.RMSNormalization()(x + layers.Dense(WIDTH, "gelu")(x))
    return _compiled([source, target], layers.Dense(VOCABULARY)(x), _entropy())


def u_net() -> keras.Model:
    """Skips from the first to the last stage, past those between."""
    image = keras.Input((8, 8, 2))
    first = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    second = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(first)
    x = layers.Conv2D(6, 3, strides=2, padding="same", activation="relu")(second)
    x = layers.concatenate([layers.UpSampling2D()(x), second])
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.concatenate([x, first])
    return _compiled(image, layers.Conv2D(1, 1)(x), "mse")


def bert() -> keras.Model:
    """The table of the embedding is the kernel of the head; in half precision."""
    ids = keras.Input((LENGTH,), dtype="int32")
    table = layers.ReversibleEmbedding(VOCABULARY, WIDTH)
    x = layers.LayerNormalization()(table(ids))
    x = layers.LayerNormalization()(_attended(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(WIDTH, "gelu")(x))
    return _compiled(ids, table(x, reverse=True), _entropy())


def resnet() -> keras.Model:
    """Batch normalization, whose statistics are those of the whole batch."""
    x = image = keras.Input((6, 6, 2))
    for filters in (4, 4):
        h = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        h = layers.ReLU()(layers.BatchNormalization()(h))
        x = layers.concatenate([x, h]) if x is image else x + layers.Dense(x.shape[-1])(h)
    x = layers.GlobalAveragePooling2D()(x)
    return _compiled(image, layers.Dense(3)(x), _entropy(), metrics=["accuracy"])


def lstm() -> keras.Model:
    """Loops over time, masked."""
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(ids)
    x = layers.LSTM(5, use_cudnn=False, return_sequences=True)(x)
    x = layers.LSTM(4, use_cudnn=False)(x)
    return _compiled(ids, layers.Dense(3)(x), _entropy())


class BalancedMoE(MoE):
    """Adds a loss for experts that are chosen unequally often."""

    def call(self, x: Any) -> Any:
        gates = ops.softmax(ops.einsum("gsm,me->gse", x, self.gate))
        share = ops.mean(gates, axis=(0, 1))
        self.add_loss(0.1 * self.experts * ops.sum(share * share))
        return super().call(x)


def moe() -> keras.Model:
    inputs = keras.Input((LENGTH, WIDTH))
    x = layers.Dense(WIDTH, "tanh")(inputs)
    x = x + BalancedMoE(4, 6, 3)(x)
    return _compiled(inputs, layers.Dense(3)(x), "mse")


def towers() -> keras.Model:
    """Two inputs whose towers meet in a product, and two outputs with losses of their own."""
    left, right = keras.Input((5,)), keras.Input((7,))
    one = layers.Dense(6)(layers.Dense(8, "tanh")(left))
    other = layers.Dense(6)(layers.Dense(8, "tanh")(right))
    score = layers.Dot(-1, normalize=True, name="score")([one, other])
    return _compiled([left, right], [score, layers.Dense(1, name="value")(one)], ["mse", "mae"])


def _entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _compiled(
    inputs: Any, outputs: Any, loss: Any, optimizer: Any = None, **arguments: Any
) -> keras.Model:
    model = keras.Model(inputs, outputs)
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss, jit_compile=False, **arguments)
    return model


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=(SAMPLES, *shape)).astype("float32")


def _ids(*shape: int, high: int = VOCABULARY) -> np.ndarray:
    return np.random.default_rng(high).integers(0, high, (SAMPLES, *shape)).astype("int32")


_WEIGHTS = np.linspace(0.1, 2.0, SAMPLES).astype("float32")

CASES = {
    "mlp": Case(mlp, (_numbers(6), _numbers(2), _WEIGHTS)),
    "gpt": Case(gpt, (_ids(LENGTH), _ids(LENGTH))),
    "t5": Case(t5, ([_ids(LENGTH), _ids(LENGTH)[::-1]], _ids(LENGTH))),
    "u-net": Case(u_net, (_numbers(8, 8, 2), _numbers(8, 8, 1))),
    "bert": Case(bert, (_ids(LENGTH), _ids(LENGTH)), policy="mixed_bfloat16", rtol=5e-2),
    "resnet": Case(resnet, (_numbers(6, 6, 2), _ids(high=3))),
    "lstm": Case(lstm, (_ids(LENGTH), _ids(high=3), _WEIGHTS)),
    "moe": Case(moe, (_numbers(LENGTH, WIDTH), _numbers(LENGTH, 3))),
    "two towers": Case(towers, ([_numbers(5), _numbers(7)], [_numbers(1), _ids(1)])),
}
