"""Layers that several models share."""

from __future__ import annotations

import keras
from keras import layers, ops

from benchmarks.models.experts import MoE


class Residual(layers.Layer):
    """A layer whose output is shaped like its first input."""

    def compute_output_shape(self, x_shape):
        return x_shape


class FeedForward(Residual):
    """Two dense layers, `fc1` and `fc2`."""

    def __init__(self, hidden: int, inner: int, activation: str = "gelu", **kwargs) -> None:
        super().__init__(**kwargs)
        self.fc1 = layers.Dense(inner, activation=activation, name="fc1")
        self.fc2 = layers.Dense(hidden, name="fc2")

    def build(self, x_shape) -> None:
        self.fc1.build(x_shape)
        self.fc2.build(self.fc1.compute_output_shape(x_shape))

    def call(self, x):
        return self.fc2(self.fc1(x))


class TransformerBlock(Residual):
    """Attention and a feed-forward layer, or experts in its place (Vaswani et al., 2017).

    Normalised before each of the two, as in GPT-2 and ViT, or after its sum (`post_norm`), as
    in BERT.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        inner: int,
        *,
        causal: bool = False,
        post_norm: bool = False,
        experts: int = 0,
        top_k: int = 2,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.causal = causal
        self.post_norm = post_norm
        self.attention = layers.MultiHeadAttention(heads, hidden // heads, name="attention")
        self.attention_norm = layers.LayerNormalization(epsilon=1e-6, name="attention_norm")
        if experts:
            self.feed_forward = MoE(inner, experts, top_k=top_k, activation="gelu", name="moe")
        else:
            self.feed_forward = FeedForward(hidden, inner, name="feed_forward")
        self.feed_forward_norm = layers.LayerNormalization(epsilon=1e-6, name="feed_forward_norm")

    def build(self, x_shape) -> None:
        self.attention_norm.build(x_shape)
        self.attention.build(x_shape, x_shape)
        self.feed_forward_norm.build(x_shape)
        self.feed_forward.build(x_shape)

    def call(self, x):
        if self.post_norm:
            x = self.attention_norm(x + self._attend(x))
            return self.feed_forward_norm(x + self.feed_forward(x))
        x = x + self._attend(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))

    def _attend(self, x):
        return self.attention(x, x, use_causal_mask=self.causal)


class TiedEmbedding(layers.Layer):
    """A table of tokens that also makes the logits (`reverse=True`)."""

    def __init__(self, input_dim: int, output_dim: int, stddev: float = 0.02, **kwargs) -> None:
        super().__init__(**kwargs)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.stddev = stddev

    def build(self, input_shape) -> None:
        self.embeddings = self.add_weight(
            (self.input_dim, self.output_dim),
            initializer=keras.initializers.RandomNormal(stddev=self.stddev),
            name="embeddings",
        )

    def call(self, inputs, reverse: bool = False):
        if reverse:
            return ops.matmul(inputs, ops.transpose(self.embeddings))
        return ops.take(self.embeddings, inputs, axis=0)


class Positions(Residual):
    """Adds a learned vector to each position of a sequence."""

    def build(self, x_shape) -> None:
        self.embeddings = self.add_weight(
            x_shape[1:], initializer=keras.initializers.RandomNormal(stddev=0.02), name="embeddings"
        )

    def call(self, x):
        return x + self.embeddings


class Bias(Residual):
    """Adds a learned vector, such as that of the logits of tied embeddings."""

    def build(self, x_shape) -> None:
        self.bias = self.add_weight((x_shape[-1],), initializer="zeros", name="bias")

    def call(self, x):
        return x + self.bias
