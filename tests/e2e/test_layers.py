"""Keras layers by kind, against one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfpar as tap
from tests.e2e.features import COLUMN, compiled, f, i, same


@pytest.mark.slow
def test_batch_normalization_is_over_the_global_batch():
    def build():
        x = keras.Input((6, 6, 4))
        h = layers.Conv2D(8, 3, name="conv")(x)
        h = layers.BatchNormalization()(h)
        h = layers.Flatten()(layers.BatchNormalization(synchronized=True)(h))
        h = layers.BatchNormalization(scale=False)(layers.Dense(10, name="fc1")(h))
        h = layers.GroupNormalization(2)(h)
        return compiled(x, layers.Dense(2)(h))

    x, y = f(7, 6, 6, 4), f(7, 2)  # the last batch is smaller
    parallel, plain = same(build, (x, y), rtol=5e-3, validation_data=(x[:5], y[:5]))
    # Four normalisations in a row amplify float32 roundings: seen up to 1.2e-4 apart.
    np.testing.assert_allclose(
        parallel.model.predict(x, verbose=0),
        plain.model.predict(x, verbose=0),
        rtol=1e-3,
        atol=1e-3,
    )


@pytest.mark.slow
def test_convolutions_and_pooling():
    def build():
        x = keras.Input((8, 8, 4))
        h = layers.Conv2D(8, 3, padding="same", name="column")(x)
        h = layers.Conv2D(8, 3, groups=2, strides=2, padding="same")(h)
        h = layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same")(h)
        h = layers.SeparableConv2D(6, 3, dilation_rate=2, padding="same")(h)
        h = layers.Conv2DTranspose(6, 3, strides=2, padding="same")(h)
        h = layers.MaxPooling2D(2, padding="same")(h) + layers.AveragePooling2D(2)(h)
        h = layers.UpSampling2D(2, interpolation="bilinear")(h)
        h = layers.ZeroPadding2D(1)(layers.Cropping2D(1)(h))
        h = layers.Concatenate()(
            [layers.GlobalAveragePooling2D()(h), layers.GlobalMaxPooling2D()(h)]
        )
        return compiled(x, layers.Dense(2)(layers.Dense(10, name="fc1")(h)))

    constraints = [*COLUMN, tap.shard("column/kernel", dim=3, axis="model")]
    same(build, (f(8, 8, 8, 4), f(8, 2)), constraints, rtol=5e-3)


@pytest.mark.slow
def test_convolutions_in_one_and_three_dims():
    def build():
        x, v = keras.Input((9, 4)), keras.Input((5, 5, 5, 2))
        h = layers.Conv1D(6, 3, padding="causal", name="column")(x)
        h = layers.SeparableConv1D(6, 3)(layers.DepthwiseConv1D(2)(h))
        h = layers.Conv1DTranspose(4, 3, strides=2)(h)
        w = layers.Conv3D(4, 2)(v)
        w = layers.MaxPooling3D(2)(layers.Conv3DTranspose(3, 2)(w))
        h = ops.concatenate(
            [layers.Flatten()(layers.AveragePooling1D(3)(h)), layers.Flatten()(w)], -1
        )
        return compiled([x, v], layers.Dense(2)(layers.Dense(10, name="fc1")(h)))

    constraints = [*COLUMN, tap.shard("column/kernel", dim=2, axis="model")]
    same(build, ([f(8, 9, 4), f(8, 5, 5, 5, 2)], f(8, 2)), constraints, rtol=5e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("masked", [False, True])
def test_recurrent_layers(masked):
    def build():
        ids = keras.Input((5,), dtype="int32")
        h = layers.Embedding(9, 6, mask_zero=masked)(ids)
        h = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(h)
        h = layers.GRU(6, return_sequences=True, go_backwards=True)(h)
        h = layers.RNN([layers.SimpleRNNCell(5), layers.LSTMCell(4)])(h)
        return compiled(ids, layers.Dense(2)(layers.Dense(10, name="fc1")(h)))

    same(build, (i(9, 8, 5), f(8, 2)), rtol=5e-3)


@pytest.mark.slow
def test_attention_layers():
    def build():
        ids = keras.Input((5,), dtype="int32")
        x = layers.Embedding(9, 8, mask_zero=True)(ids)
        h = layers.MultiHeadAttention(2, 4, use_bias=False, dropout=0.1, seed=1, name="mha")(
            x, x, use_causal_mask=True
        )
        h = layers.GroupQueryAttention(4, 4, 2, use_bias=False, name="gqa")(h, x)
        h = h + layers.Attention(use_scale=True, dropout=0.1, seed=2)([h, x])
        h = h + layers.AdditiveAttention()([h, x])
        if hasattr(layers, "RMSNormalization"):
            h = layers.RMSNormalization()(h)
        h = layers.EinsumDense("abc,cd->abd", (5, 10), bias_axes="d")(h)[:, 0]
        return compiled(ids, layers.Dense(2)(layers.Dense(10, name="fc1")(h)))

    constraints = [*COLUMN, tap.shard("(mha|gqa)/(query|key|value)/kernel", dim=1, axis="model")]
    same(build, (i(9, 8, 5), f(8, 2)), constraints, rtol=5e-3)
