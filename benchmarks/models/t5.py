"""T5, and the Switch Transformer: T5 with experts as feed-forward layers."""

from __future__ import annotations

import math

import keras
from keras import layers, ops

from benchmarks.models.blocks import Residual, TiedEmbedding
from benchmarks.models.experts import MoE


class RMSNorm(Residual):
    """Layer normalisation without mean and bias (Zhang and Sennrich, 2019)."""

    def build(self, x_shape) -> None:
        self.scale = self.add_weight((x_shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return x * ops.rsqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + 1e-6) * self.scale


class RelativeBias(layers.Layer):
    """What each head adds to its scores, by the distance from query to key.

    Distances up to half the buckets have one each, longer ones share them in steps that grow
    with the distance. With `causal`, later keys get so low a score that they do not count.
    """

    def __init__(
        self, heads: int, *, causal: bool = False, buckets: int = 32, longest: int = 128, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.heads = heads
        self.causal = causal
        self.buckets = buckets
        self.longest = longest

    def build(self, x_shape) -> None:
        self.embeddings = self.add_weight((self.buckets, self.heads), name="embeddings")

    def call(self, x):
        positions = ops.arange(x.shape[1])
        ahead = positions[None, :] - positions[:, None]
        bias = ops.transpose(ops.take(self.embeddings, self._bucket(ahead), axis=0), (2, 0, 1))
        if self.causal:
            bias = bias + ops.where(ahead > 0, -1e9, 0.0)
        return bias[None]

    def compute_output_shape(self, x_shape):
        return (1, self.heads, x_shape[1], x_shape[1])

    def _bucket(self, ahead):
        """The bucket of each distance; those ahead have half of them, unless `causal`."""
        count = self.buckets if self.causal else self.buckets // 2
        distance = ops.maximum(-ahead, 0) if self.causal else ops.abs(ahead)
        exact = count // 2
        octaves = ops.log(ops.cast(ops.maximum(distance, 1), "float32") / exact)
        steps = octaves / math.log(self.longest / exact) * (count - exact)
        far = ops.minimum(exact + ops.cast(steps, "int32"), count - 1)
        bucket = ops.where(distance < exact, distance, far)
        return bucket if self.causal else bucket + ops.where(ahead > 0, count, 0)


class Attention(layers.Layer):
    """Attention of `x` to `memory`: four matrices without bias, scores that are not scaled."""

    def __init__(self, hidden: int, heads: int, head_dim: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.heads = heads
        self.head_dim = head_dim
        # As the scores are not scaled, the queries begin small.
        small = keras.initializers.RandomNormal(stddev=(hidden * head_dim) ** -0.5)
        inner = heads * head_dim
        self.query = layers.Dense(inner, use_bias=False, kernel_initializer=small, name="query")
        self.key = layers.Dense(inner, use_bias=False, name="key")
        self.value = layers.Dense(inner, use_bias=False, name="value")
        self.out = layers.Dense(hidden, use_bias=False, name="out")

    def build(self, x_shape) -> None:
        for layer in (self.query, self.key, self.value):
            layer.build(x_shape)
        self.out.build(self.query.compute_output_shape(x_shape))

    def call(self, x, memory, bias=None):
        query = self._heads(self.query(x))
        key, value = self._heads(self.key(memory)), self._heads(self.value(memory))
        scores = ops.einsum("bqhd,bkhd->bhqk", query, key)
        if bias is not None:
            scores = scores + bias
        mixed = ops.einsum("bhqk,bkhd->bqhd", ops.softmax(scores), value)
        return self.out(ops.reshape(mixed, (-1, x.shape[1], self.heads * self.head_dim)))

    def _heads(self, x):
        return ops.reshape(x, (-1, x.shape[1], self.heads, self.head_dim))


class ReluFeedForward(Residual):
    """Two matrices without bias, `wi` and `wo`."""

    def __init__(self, hidden: int, inner: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.wi = layers.Dense(inner, activation="relu", use_bias=False, name="wi")
        self.wo = layers.Dense(hidden, use_bias=False, name="wo")

    def build(self, x_shape) -> None:
        self.wi.build(x_shape)
        self.wo.build(self.wi.compute_output_shape(x_shape))

    def call(self, x):
        return self.wo(self.wi(x))


def _feed_forward(hidden: int, inner: int, experts: int) -> layers.Layer:
    if experts:
        return MoE(inner, experts, name="moe")
    return ReluFeedForward(hidden, inner, name="feed_forward")


class EncoderBlock(Residual):
    """Attention and a feed-forward layer: six matrices, or `experts`."""

    def __init__(
        self, hidden: int, heads: int, head_dim: int, inner: int, experts: int = 0, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.attention_norm = RMSNorm(name="attention_norm")
        self.attention = Attention(hidden, heads, head_dim, name="attention")
        self.feed_forward_norm = RMSNorm(name="feed_forward_norm")
        self.feed_forward = _feed_forward(hidden, inner, experts)

    def build(self, x_shape) -> None:
        for layer in (
            self.attention_norm,
            self.attention,
            self.feed_forward_norm,
            self.feed_forward,
        ):
            layer.build(x_shape)

    def call(self, x, bias):
        h = self.attention_norm(x)
        x = x + self.attention(h, h, bias)
        return x + self.feed_forward(self.feed_forward_norm(x))


class DecoderBlock(EncoderBlock):
    """An encoder block that also attends to what the encoder made of its tokens."""

    def __init__(
        self, hidden: int, heads: int, head_dim: int, inner: int, experts: int = 0, **kwargs
    ) -> None:
        super().__init__(hidden, heads, head_dim, inner, experts, **kwargs)
        self.cross_norm = RMSNorm(name="cross_norm")
        self.cross_attention = Attention(hidden, heads, head_dim, name="cross_attention")

    def build(self, x_shape) -> None:
        super().build(x_shape)
        self.cross_norm.build(x_shape)
        self.cross_attention.build(x_shape)

    def call(self, x, memory, bias):
        h = self.attention_norm(x)
        x = x + self.attention(h, h, bias)
        x = x + self.cross_attention(self.cross_norm(x), memory)
        return x + self.feed_forward(self.feed_forward_norm(x))


def t5(
    vocabulary: int = 64,
    length: int = 16,
    hidden: int = 32,
    heads: int = 4,
    head_dim: int = 8,
    inner: int = 64,
    num_layers: int = 2,
    experts: int = 0,
    name: str = "t5",
) -> keras.Model:
    """T5 v1.0 (Raffel et al., 2020): `num_layers` encoder and as many decoder blocks."""
    sizes = (hidden, heads, head_dim, inner, experts)
    tokens = keras.Input((length,), dtype="int32", name="encoder_tokens")
    targets = keras.Input((length,), dtype="int32", name="decoder_tokens")
    table = TiedEmbedding(vocabulary, hidden, stddev=1.0, name="tokens")

    memory = table(tokens)
    bias = RelativeBias(heads, name="encoder_relative_bias")(memory)
    for i in range(num_layers):
        memory = EncoderBlock(*sizes, name=f"encoder_block_{i}")(memory, bias)
    memory = RMSNorm(name="encoder_norm")(memory)

    x = table(targets)
    bias = RelativeBias(heads, causal=True, name="decoder_relative_bias")(x)
    for i in range(num_layers):
        x = DecoderBlock(*sizes, name=f"decoder_block_{i}")(x, memory, bias)
    x = RMSNorm(name="decoder_norm")(x)
    x = layers.Rescaling(hidden**-0.5, name="logits_scale")(x)
    return keras.Model([tokens, targets], table(x, reverse=True), name=name)


def switch(experts: int = 4, name: str = "switch", **sizes) -> keras.Model:
    """The Switch Transformer (Fedus et al., 2021): T5 with one expert of each layer per token."""
    return t5(experts=experts, name=name, **sizes)
