"""Models of sound."""

from __future__ import annotations

import keras
from keras import layers

from benchmarks.models.blocks import Residual, TransformerBlock

LAYERS = ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2))
"""Kernel and stride of each layer of wav2vec 2.0 that turns samples into features."""


class Features(layers.Layer):
    """A convolution over time, normalised."""

    def __init__(self, channels: int, kernel: int, stride: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.conv = layers.Conv1D(channels, kernel, strides=stride, name="conv")
        self.norm = layers.LayerNormalization(name="norm")

    def build(self, x_shape) -> None:
        self.conv.build(x_shape)
        self.norm.build(self.conv.compute_output_shape(x_shape))

    def call(self, x):
        return keras.activations.gelu(self.norm(self.conv(x)))

    def compute_output_shape(self, x_shape):
        return self.conv.compute_output_shape(x_shape)


class ConvolutionalPositions(Residual):
    """Adds what a wide, grouped convolution makes of the neighbourhood."""

    def __init__(self, hidden: int, kernel: int, groups: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.conv = layers.Conv1D(
            hidden, kernel, padding="same", groups=groups, activation="gelu", name="conv"
        )

    def build(self, x_shape) -> None:
        self.conv.build(x_shape)

    def call(self, x):
        return x + self.conv(x)


def wav2vec2(
    samples: int = 1600,
    classes: int = 16,
    channels: int = 16,
    hidden: int = 32,
    heads: int = 4,
    inner: int = 64,
    num_layers: int = 2,
    kernel: int = 8,
    groups: int = 4,
    convolutions: tuple[tuple[int, int], ...] = LAYERS,
) -> keras.Model:
    """wav2vec 2.0 (Baevski et al., 2020), fine-tuned to one label per frame."""
    sound = keras.Input((samples, 1))
    x = sound
    for i, (width, stride) in enumerate(convolutions):
        x = Features(channels, width, stride, name=f"feature_{i}")(x)
    x = layers.LayerNormalization(name="feature_norm")(x)
    x = layers.Dense(hidden, name="projection")(x)
    x = ConvolutionalPositions(hidden, kernel, groups, name="positions")(x)
    for i in range(num_layers):
        x = TransformerBlock(hidden, heads, inner, name=f"block_{i}")(x)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(sound, layers.Dense(classes, name="head")(x), name="wav2vec2")
