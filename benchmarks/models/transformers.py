"""Language models of one stack."""

from __future__ import annotations

import keras
from keras import layers

from benchmarks.models.blocks import Bias, Positions, TiedEmbedding, TransformerBlock


def gpt(
    vocabulary: int = 8000,
    length: int = 128,
    hidden: int = 256,
    heads: int = 4,
    num_layers: int = 4,
) -> keras.Model:
    """A decoder-only transformer with learned positions, pre-normalised."""
    tokens = keras.Input((length,), dtype="int32")
    positions = keras.ops.arange(length)
    x = layers.Embedding(vocabulary, hidden, name="tokens")(tokens)
    x = x + layers.Embedding(length, hidden, name="positions")(positions)
    for i in range(num_layers):
        h = layers.LayerNormalization(name=f"block_{i}_ln1")(x)
        h = layers.MultiHeadAttention(heads, hidden // heads, name=f"block_{i}_attention")(
            h, h, use_causal_mask=True
        )
        x = x + h
        h = layers.LayerNormalization(name=f"block_{i}_ln2")(x)
        h = layers.Dense(4 * hidden, activation="gelu", name=f"block_{i}_fc1")(h)
        x = x + layers.Dense(hidden, name=f"block_{i}_fc2")(h)
    x = layers.LayerNormalization(name="ln")(x)
    return keras.Model(tokens, layers.Dense(vocabulary, name="head")(x))


def gshard_moe(
    vocabulary: int = 64,
    length: int = 16,
    hidden: int = 32,
    heads: int = 4,
    inner: int = 64,
    num_layers: int = 2,
    experts: int = 4,
) -> keras.Model:
    """Two experts for each token in every other layer (GShard: Lepikhin et al., 2020).

    Here as a decoder-only language model.
    """
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, hidden, name="tokens")(tokens)
    x = Positions(name="positions")(x)
    for i in range(num_layers):
        x = TransformerBlock(
            hidden, heads, inner, causal=True, experts=experts * (i % 2), name=f"block_{i}"
        )(x)
    x = layers.LayerNormalization(name="norm")(x)
    logits = layers.Dense(vocabulary, name="head")(x)
    return keras.Model(tokens, logits, name="gshard_moe")


def bert(
    vocabulary: int = 64,
    length: int = 16,
    hidden: int = 32,
    heads: int = 4,
    inner: int = 64,
    num_layers: int = 2,
    convolutions: int = 0,
    name: str = "bert",
) -> keras.Model:
    """BERT with the head of its masked tokens (Devlin et al., 2019); all of one segment.

    After `convolutions` over neighbouring tokens.
    """
    tokens = keras.Input((length,), dtype="int32")
    table = TiedEmbedding(vocabulary, hidden, name="tokens")
    x = table(tokens)
    for i in range(convolutions):
        x = layers.Conv1D(hidden, 3, padding="same", activation="gelu", name=f"conv_{i}")(x)
    x = Positions(name="positions")(x)
    x = layers.LayerNormalization(name="embedding_norm")(x)
    for i in range(num_layers):
        x = TransformerBlock(hidden, heads, inner, post_norm=True, name=f"block_{i}")(x)
    x = layers.Dense(hidden, activation="gelu", name="head_dense")(x)
    x = layers.LayerNormalization(name="head_norm")(x)
    logits = Bias(name="head_bias")(table(x, reverse=True))
    return keras.Model(tokens, logits, name=name)


def dnabert(convolutions: int = 2, name: str = "dnabert", **sizes) -> keras.Model:
    """DNABERT (Ji et al., 2021), BERT of k-mers, here with convolutions as in Rhino (§7.4)."""
    return bert(convolutions=convolutions, name=name, **sizes)


def albert(
    vocabulary: int = 64,
    length: int = 16,
    embedding: int = 8,
    hidden: int = 32,
    heads: int = 4,
    inner: int = 64,
    num_layers: int = 2,
) -> keras.Model:
    """ALBERT with the head of its masked tokens (Lan et al., 2020): one block's weights in all
    layers, and vectors of `embedding` entries for tokens; all of one segment."""
    tokens = keras.Input((length,), dtype="int32")
    table = TiedEmbedding(vocabulary, embedding, name="tokens")
    x = Positions(name="positions")(table(tokens))
    x = layers.LayerNormalization(name="embedding_norm")(x)
    x = layers.Dense(hidden, name="embedding_projection")(x)
    block = TransformerBlock(hidden, heads, inner, post_norm=True, name="block")
    for _ in range(num_layers):
        x = block(x)
    x = layers.Dense(embedding, activation="gelu", name="head_dense")(x)
    x = layers.LayerNormalization(name="head_norm")(x)
    logits = Bias(name="head_bias")(table(x, reverse=True))
    return keras.Model(tokens, logits, name="albert")
