"""The models whose steps are saved in this folder, by the names of their files; they need Keras.

`python -m scripts.save_graphs --model NAME` saves the step of a new one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.models import SMALL, compile_model, gpt, wide
from tests.graphs import BATCH

Build = Callable[[], keras.Model]


def rows(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of features, and of the numbers of their classes."""
    return np.zeros(shape, "float32"), np.zeros(shape[0], "int32")


def small(name: str, **sizes: Any) -> Build:
    """A model of the benchmarks, in the sizes that are given."""
    return functools.partial(SMALL[name], **sizes)


# --- layers one after the other -----------------------------------------------------------------


def mlp() -> keras.Model:
    x = inputs = keras.Input((96,))
    x = layers.Dense(512, "relu", name="stem")(x)
    x = layers.Dense(64, name="narrow")(x)
    return keras.Model(inputs, layers.Dense(4000, name="head")(x))


def dense() -> keras.Model:
    inputs = keras.Input((12,))
    return keras.Model(inputs, layers.Dense(8, name="dense")(inputs))


def one_large_layer() -> keras.Model:
    return compiled(keras.Sequential([keras.Input((8,)), layers.Dense(4096, use_bias=False)]))


def two_layers() -> keras.Model:
    both = [layers.Dense(8, name="first"), layers.Dense(4, name="second")]
    return compiled(keras.Sequential([keras.Input((8,)), *both]))


def three_layers() -> keras.Model:
    widths = {"stem": 512, "narrow": 32, "head": 4000}
    dense = [layers.Dense(width, use_bias=False, name=name) for name, width in widths.items()]
    return compiled(keras.Sequential([keras.Input((96,)), *dense]), "adam")


def hourglass() -> keras.Model:
    """Pairs of large weights, ever smaller."""
    x = inputs = keras.Input((32,))
    for width in (2048, 1024, 512, 256):
        x = layers.Dense(width, "relu", name=f"wide_{width}")(x)
        x = layers.Dense(32, name=f"narrow_{width}")(x)
    return keras.Model(inputs, x)


def perceptron(cast: bool = False) -> keras.Model:
    inputs = keras.Input((6,))
    h = layers.Lambda(lambda x: ops.cast(x, "float64"))(inputs)
    h = layers.Dense(4, dtype="float64" if cast else "float32")(h if cast else inputs)
    return compiled(keras.Model(inputs, layers.Dense(3, name="fc2")(h)))


def frozen() -> keras.Model:
    """A layer that is not trained, and one that is."""
    inputs = keras.Input((16,))
    h = layers.Dense(64, "relu", trainable=False)(inputs)
    return compiled(keras.Model(inputs, layers.Dense(3)(h)))


# --- blocks that repeat ---------------------------------------------------------------------------


def residual_mlp() -> keras.Model:
    """No gradient flows to what the first block reads."""
    x = inputs = keras.Input((16,))
    for i in range(6):
        h = layers.Dense(32, activation="relu", name=f"block_{i}_fc1")(x)
        x = x + layers.Dense(16, name=f"block_{i}_fc2")(h)
    return keras.Model(inputs, layers.Dense(4, name="head")(x), name="mlp")


def mixer() -> keras.Model:
    """Blocks whose layers have no names of their own."""
    inputs = keras.Input((16,))
    x = layers.Dense(8)(inputs)
    for _ in range(5):
        h = layers.LayerNormalization()(x)
        h = layers.Dense(32, activation="gelu")(h)
        x = layers.Add()([x, layers.Dense(8)(h)])
    return keras.Model(inputs, layers.Dense(4)(x))


def penalized() -> keras.Model:
    """Five layers, and a loss that has the squares of their weights in it."""
    from tests.e2e.random_models import TwoSteps

    x = inputs = keras.Input((4,))
    for _ in range(5):
        x = layers.Dense(4, "relu")(x)
    return compiled(TwoSteps(inputs, layers.Dense(3)(x)))


# --- lookups, images, sequences -------------------------------------------------------------------


def embedded() -> keras.Model:
    tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(3000, 64, name="tokens")(tokens)
    x = layers.Dense(128, "relu", name="fc1")(layers.Flatten()(x))
    return keras.Model(tokens, layers.Dense(10, name="head")(x))


def convolutions() -> keras.Model:
    x = inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(16, 3, padding="same", name="conv1")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Conv2D(24, 3, padding="same", name="conv2")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(500, name="head")(x))


def convnet() -> keras.Model:
    x = inputs = keras.Input((8, 8, 2))
    x = layers.Conv2D(4, 4, padding="same", name="conv")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(6, name="head")(x))


class FusedNormalization(layers.Layer):
    """Batch normalisation by TensorFlow's fused kernel."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        for name, kind in (("scale", "ones"), ("offset", "zeros")):
            setattr(self, name, self.add_weight(shape=shape[-1:], initializer=kind, name=name))

    def call(self, x: Any) -> Any:
        scale, offset = map(tf.convert_to_tensor, (self.scale, self.offset))
        return tf.compat.v1.nn.fused_batch_norm(x, scale, offset)[0]


def normalized_by_kernels() -> keras.Model:
    x = inputs = keras.Input((8, 8, 3))
    for i, channels in enumerate((8, 16, 16)):
        x = layers.Conv2D(channels, 3, padding="same", use_bias=False, name=f"conv{i}")(x)
        x = ops.relu(FusedNormalization(name=f"norm{i}")(x))
    return keras.Model(inputs, layers.Dense(5, name="head")(layers.GlobalAveragePooling2D()(x)))


def large_image() -> keras.Model:
    images = x = keras.Input((512, 512, 3))
    for i in range(3):
        x = layers.Conv2D(32, 3, padding="same", name=f"conv_{i}")(x)
    return keras.Model(images, layers.Conv2D(4, 1, name="head")(x))


def fused_attention(length: int = 16, hidden: int = 64, heads: int = 8) -> keras.Model:
    """One sequence, Q, K and V projected by one kernel."""
    inputs = keras.Input((length, hidden))
    fused = layers.Dense(3 * hidden, use_bias=False, name="qkv")(inputs)
    fused = ops.reshape(fused, (-1, length, 3, heads, hidden // heads))
    query, key, value = (ops.transpose(fused[:, :, i], (0, 2, 1, 3)) for i in range(3))
    scores = ops.softmax(ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))))
    mixed = ops.transpose(ops.matmul(scores, value), (0, 2, 1, 3))
    out = layers.Dense(hidden, name="out")(ops.reshape(mixed, (-1, length, hidden)))
    return keras.Model(inputs, layers.Dense(10, name="head")(out[:, 0]))


def every_weight() -> keras.Model:
    """One weight of every kind."""
    tokens = keras.Input((8,), dtype="int32")
    x = layers.Embedding(32, 16, name="tokens")(tokens)
    x = layers.Conv1D(24, 3, padding="same", name="conv")(x)
    x = layers.Dense(48, use_bias=False, name="fused")(x)  # 3 x 4 x 4: unlike q, k and v
    q, k, v = (ops.reshape(x, (-1, 8, 3, 4, 4))[:, :, i] for i in range(3))
    scores = ops.einsum("bqhd,bkhd->bhqk", q, k)
    x = ops.einsum("bhqk,bkhd->bqhd", ops.softmax(scores), v)
    x = layers.EinsumDense("bqhd,hdm->bqm", (None, 16), name="out")(x)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(10, name="head")(x))


def mixture() -> keras.Model:
    """Two layers whose experts weigh more than the tokens that they are sent."""
    from tests.e2e.test_patterns import MoE

    x = inputs = keras.Input((16, 8))
    for i in range(2):
        x = layers.Dense(8, "gelu", name=f"stem_{i}")(x)
        x = x + MoE(4, 256, 6, name=f"moe_{i}")(x)
    return compiled(keras.Model(inputs, layers.Dense(3)(x)), "adam")


def recurrent() -> keras.Model:
    words = keras.Input((12,), dtype="int32")
    x = layers.Embedding(60, 16)(words)
    x = layers.LSTM(32, use_cudnn=False)(x)
    return keras.Model(words, layers.Dense(40)(x))


def mixed_gpt() -> keras.Model:
    """Five layers, computed in bfloat16."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return compile_model(SMALL["gpt"](num_layers=5))
    finally:
        keras.config.set_dtype_policy(before)


def compiled(model: keras.Model, optimizer: str = "sgd") -> keras.Model:
    """For a regression; models that are not compiled are made to classify."""
    model.compile(optimizer, "mse", jit_compile=False)
    return model


_SMALL_T5 = dict(hidden=1024, inner=4096, heads=16, head_dim=64, length=512, vocabulary=32128)

MODELS: dict[str, tuple[Build, Any]] = {
    **{name: (SMALL[name], BATCH) for name in ("gpt", "wide", "resnet", "gshard_moe", "t5")},
    "mlp": (mlp, rows(16, 96)),
    "dense": (dense, rows(8, 12)),
    "one_large_layer": (one_large_layer, (rows(1, 8)[0], rows(1, 4096)[0])),
    "two_layers": (two_layers, (tf.TensorSpec((16, 8)), tf.TensorSpec((16, 4)))),
    "three_layers": (three_layers, (rows(16, 96)[0], rows(16, 4000)[0])),
    "hourglass": (hourglass, rows(8, 32)),
    "perceptron": (perceptron, (rows(8, 6)[0], rows(8, 3)[0])),
    "perceptron_with_a_cast": (
        functools.partial(perceptron, cast=True),
        (rows(8, 6)[0], rows(8, 3)[0]),
    ),
    "frozen": (frozen, (rows(256, 16)[0], rows(256, 3)[0])),
    "residual_mlp": (residual_mlp, BATCH),
    "mixer": (mixer, BATCH),
    "penalized": (penalized, (tf.TensorSpec((8, 4)), tf.TensorSpec((8, 3)))),
    "embedded": (embedded, (np.zeros((16, 12), "int32"), np.zeros(16, "int32"))),
    "convolutions": (convolutions, rows(8, 8, 8, 3)),
    "convnet": (convnet, rows(4, 8, 8, 2)),
    "large_image": (large_image, 1),
    "normalized_by_kernels": (normalized_by_kernels, rows(16, 8, 8, 3)),
    "fused_attention": (fused_attention, rows(1, 16, 64)),
    "every_weight": (every_weight, (np.zeros((4, 8), "int32"), np.zeros((4, 8), "int32"))),
    "mixture": (mixture, (tf.TensorSpec((16, 16, 8)), tf.TensorSpec((16, 16, 3)))),
    "recurrent": (recurrent, (np.zeros((8, 12), "int32"), np.zeros(8, "int32"))),
    "gpt_mixed": (mixed_gpt, BATCH),
    # in other sizes
    "gpt_2000_words": (small("gpt", num_layers=4, vocabulary=2000), BATCH),
    "gpt_5_layers": (small("gpt", num_layers=5), BATCH),
    "gpt_50257_words": (
        small("gpt", vocabulary=50_257, length=256, hidden=512, heads=8, num_layers=2),
        BATCH,
    ),
    "gpt_medium": (small("gpt", length=512, hidden=1024, heads=16, num_layers=2), 4),
    "gpt_one_sequence": (
        lambda: gpt(8000, length=512, hidden=1024, heads=16, num_layers=4),
        1,
    ),
    "gpt_one_layer": (lambda: gpt(8000, length=128, hidden=256, num_layers=1), BATCH),
    "gpt_short": (lambda: gpt(8000, length=32, hidden=512, num_layers=2), 64),
    "gpt_narrow": (lambda: gpt(512, length=16, hidden=32, num_layers=4), BATCH),
    "gpt_wide": (lambda: gpt(512, length=256, hidden=1024, heads=8, num_layers=2), 16),
    "t5_3_layers": (small("t5", num_layers=3, vocabulary=2000), BATCH),
    "t5_4_layers": (small("t5", num_layers=4), BATCH),
    "t5_large": (small("t5", num_layers=2, **_SMALL_T5), 1),
    "moe_inner_512": (small("gshard_moe", inner=512), BATCH),
    "moe_4_layers": (small("gshard_moe", num_layers=4), BATCH),
    "moe_4_experts": (
        small(
            "gshard_moe",
            hidden=256,
            inner=4096,
            num_layers=2,
            length=128,
            experts=4,
            vocabulary=1000,
        ),
        32,
    ),
    "moe_8_experts": (
        small(
            "gshard_moe",
            hidden=256,
            inner=4096,
            num_layers=4,
            length=128,
            experts=8,
            vocabulary=1000,
        ),
        32,
    ),
    "resnet_20000_classes": (small("resnet", classes=20_000), BATCH),
    "resnet_200000_classes": (small("resnet", classes=200_000), 64),
    "resnet_10_classes": (small("resnet", classes=10), 64),
    "resnet_two_stages": (small("resnet", blocks=(4, 4)), BATCH),
    "wide_1000_classes": (small("wide", classes=1000), BATCH),
    "wide_2000_classes": (small("wide", classes=2000), BATCH),
    "wide_20000_classes": (small("wide", classes=20_000), BATCH),
    "wide_50000_classes": (lambda: wide(50_000), 32),
    "resnet_2000_classes": (small("resnet", classes=2000), BATCH),
    "vgg": (small("vgg", size=32, channels=(64, 128), hidden=1024, classes=200_000), 256),
    "unet": (small("unet", size=64, channels=32), 64),
    "dnabert": (SMALL["dnabert"], 64),
    "vit_4_layers": (small("vit", num_layers=4), BATCH),
    "vit_5_layers": (small("vit", num_layers=5), BATCH),
    "vit_7_layers": (small("vit", num_layers=7), BATCH),
    "vmoe_6_layers": (small("vmoe", num_layers=6), BATCH),
    "vmoe_8_layers": (small("vmoe", num_layers=8), BATCH),
    "clip_4_layers": (small("clip", num_layers=4), BATCH),
    "widenet_4_layers": (small("widenet", num_layers=4), BATCH),
}
"""By name: how the model is made, and a batch of it, or the size of one."""
