"""Models of images: a wide classifier, transformers, and those with experts."""

from __future__ import annotations

import keras
from keras import layers, ops

from benchmarks.models.blocks import Positions, TransformerBlock
from benchmarks.models.experts import MoE


def wide(classes: int = 50_000) -> keras.Model:
    """A small residual MLP body with a very wide classifier."""
    inputs = keras.Input((784,))
    x = layers.Dense(512, activation="relu", name="stem")(inputs)
    for i in range(2):
        h = layers.Dense(512, activation="relu", name=f"block_{i}_fc1")(x)
        x = x + layers.Dense(512, name=f"block_{i}_fc2")(h)
    return keras.Model(inputs, layers.Dense(classes, name="head")(x))


class Patches(layers.Layer):
    """An image as a sequence: a token of its own, then one vector for each square of it."""

    def __init__(self, hidden: int, patch: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.hidden = hidden
        self.projection = layers.Conv2D(hidden, patch, strides=patch, name="projection")
        self.positions = Positions(name="positions")

    def build(self, image_shape) -> None:
        self.projection.build(image_shape)
        self.token = self.add_weight((1, 1, self.hidden), initializer="zeros", name="token")
        self.positions.build(self.compute_output_shape(image_shape))

    def call(self, image):
        x = self.projection(image)
        x = ops.reshape(x, (-1, x.shape[1] * x.shape[2], self.hidden))
        token = ops.broadcast_to(self.token, (ops.shape(x)[0], 1, self.hidden))
        return self.positions(ops.concatenate([token, x], axis=1))

    def compute_output_shape(self, image_shape):
        batch, height, width, _ = self.projection.compute_output_shape(image_shape)
        return (batch, height * width + 1, self.hidden)


def vit(
    classes: int = 16,
    size: int = 32,
    patch: int = 8,
    hidden: int = 32,
    heads: int = 4,
    inner: int = 64,
    num_layers: int = 2,
    experts: int = 0,
    every: int = 2,
    name: str = "vit",
) -> keras.Model:
    """ViT (Dosovitskiy et al., 2021), with `experts` in each `every`th block."""
    images = keras.Input((size, size, 3))
    x = Patches(hidden, patch, name="patches")(images)
    for i in range(num_layers):
        of_block = experts if i % every == every - 1 else 0
        x = TransformerBlock(hidden, heads, inner, experts=of_block, name=f"block_{i}")(x)
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    return keras.Model(images, layers.Dense(classes, name="head")(x[:, 0]), name=name)


def vmoe(experts: int = 4, name: str = "vmoe", **sizes) -> keras.Model:
    """V-MoE (Riquelme et al., 2021): ViT with two experts for each patch in every other block."""
    return vit(experts=experts, name=name, **sizes)


class SharedBlocks(layers.Layer):
    """Blocks of one attention and one layer of experts; only the normalisations are their own."""

    def __init__(
        self, hidden: int, heads: int, inner: int, experts: int, num_layers: int, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(heads, hidden // heads, name="attention")
        self.moe = MoE(inner, experts, top_k=2, activation="gelu", name="moe")
        self.norms = [
            [layers.LayerNormalization(epsilon=1e-6, name=f"block_{i}_norm{k}") for k in (1, 2)]
            for i in range(num_layers)
        ]

    def build(self, x_shape) -> None:
        self.attention.build(x_shape, x_shape)
        self.moe.build(x_shape)
        for norms in self.norms:
            for norm in norms:
                norm.build(x_shape)

    def call(self, x):
        for i, (attention_norm, moe_norm) in enumerate(self.norms):
            with keras.name_scope(f"block_{i}"):
                h = attention_norm(x)
                x = x + self.attention(h, h)
                x = x + self.moe(moe_norm(x))
        return x

    def compute_output_shape(self, x_shape):
        return x_shape


def widenet(
    classes: int = 16,
    size: int = 32,
    patch: int = 8,
    hidden: int = 32,
    heads: int = 4,
    inner: int = 64,
    experts: int = 4,
    num_layers: int = 2,
) -> keras.Model:
    """WideNet (Xue et al., 2022): a ViT of experts whose blocks share their weights."""
    images = keras.Input((size, size, 3))
    x = Patches(hidden, patch, name="patches")(images)
    x = SharedBlocks(hidden, heads, inner, experts, num_layers, name="blocks")(x)
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    return keras.Model(images, layers.Dense(classes, name="head")(x[:, 0]), name="widenet")
