"""CLIP: an image and a text tower that learn which text goes with which image."""

from __future__ import annotations

import math

import keras
from keras import layers, ops

from benchmarks.models.blocks import Positions, TransformerBlock
from benchmarks.models.vision import Patches


class Similarity(layers.Layer):
    """The logits of each image with each text of the batch."""

    def build(self, images_shape) -> None:
        start = keras.initializers.Constant(math.log(1 / 0.07))
        self.scale = self.add_weight((), initializer=start, name="scale")

    def call(self, images, texts):
        images, texts = ops.normalize(images), ops.normalize(texts)
        return ops.exp(self.scale) * ops.matmul(images, ops.transpose(texts))

    def compute_output_shape(self, images_shape, texts_shape):
        return (images_shape[0], texts_shape[0])


class ContrastiveLoss(keras.losses.Loss):
    """Cross-entropy over the texts of each image and over the images of each text.

    The labels say which text goes with each image: 0, 1, 2, ...
    """

    def call(self, y_true, y_pred):
        of_images = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        of_texts = keras.losses.sparse_categorical_crossentropy(
            y_true, ops.transpose(y_pred), from_logits=True
        )
        return (of_images + of_texts) / 2


def clip(
    size: int = 32,
    patch: int = 8,
    image_hidden: int = 32,
    image_heads: int = 4,
    vocabulary: int = 64,
    length: int = 16,
    text_hidden: int = 32,
    text_heads: int = 4,
    shared: int = 32,
    num_layers: int = 2,
) -> keras.Model:
    """CLIP with a ViT (Radford et al., 2021); `num_layers` in each tower."""
    images = keras.Input((size, size, 3), name="images")
    x = Patches(image_hidden, patch, name="patches")(images)
    x = layers.LayerNormalization(name="image_first_norm")(x)
    for i in range(num_layers):
        x = TransformerBlock(image_hidden, image_heads, 4 * image_hidden, name=f"image_block_{i}")(
            x
        )
    x = layers.LayerNormalization(name="image_norm")(x[:, 0])
    x = layers.Dense(shared, use_bias=False, name="image_projection")(x)

    texts = keras.Input((length,), dtype="int32", name="texts")
    t = layers.Embedding(vocabulary, text_hidden, name="tokens")(texts)
    t = Positions(name="text_positions")(t)
    for i in range(num_layers):
        t = TransformerBlock(
            text_hidden, text_heads, 4 * text_hidden, causal=True, name=f"text_block_{i}"
        )(t)
    t = layers.LayerNormalization(name="text_norm")(t[:, -1])
    t = layers.Dense(shared, use_bias=False, name="text_projection")(t)
    return keras.Model([images, texts], Similarity(name="similarity")(x, t), name="clip")
