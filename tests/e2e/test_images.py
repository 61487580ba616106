"""Convolutional models with normalisation, dropout and random layers train as on one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.equivalence import assert_equivalent

rng = np.random.default_rng(0)
DATA = (
    rng.normal(size=(24, 8, 8, 3)).astype("float32"),
    rng.integers(0, 5, 24).astype("int32"),
)


def network(*middle):
    def build():
        x = inputs = keras.Input((8, 8, 3))
        for layer in middle:
            x = layer()(x)
        x = layers.GlobalAveragePooling2D()(x)
        model = keras.Model(inputs, layers.Dense(5, name="head")(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        accuracy = keras.metrics.SparseTopKCategoricalAccuracy(2)
        model.compile(
            keras.optimizers.SGD(0.1, 0.9), loss, metrics=["accuracy", accuracy], jit_compile=False
        )
        return model

    return build


RESIDUAL = network(
    lambda: layers.Conv2D(8, 3, padding="same", use_bias=False, name="conv1"),
    layers.BatchNormalization,
    layers.ReLU,
    layers.MaxPooling2D,
    lambda: layers.DepthwiseConv2D(3, padding="same", name="depthwise"),
    lambda: layers.Conv2D(6, 1, strides=2, name="conv2"),
    lambda: layers.GroupNormalization(2),
    lambda: layers.Dropout(0.3, seed=3),
)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [nightly(8), 10])
def test_data_parallel(batch_size):
    parallel, _ = assert_equivalent(
        RESIDUAL, (DATA[0][:20], DATA[1][:20]), tap.split([4]), batch_size=batch_size
    )
    partitioned = parallel.executable().partitioned
    draws = {
        op: d for op, d in partitioned.decisions.items() if op.type.startswith("StatelessRandomU")
    }
    assert draws and all(d.strategy.splits[0][0] >= 0 for d in draws.values())


@pytest.mark.slow
def test_output_channels_split():
    constraints = [
        tap.shard(r"conv1/kernel", dim=3, axis="model"),
        tap.shard(r"depthwise/kernel", dim=2, axis="model"),
    ]
    mesh = tap.Mesh(("data", "model"), (2, 2))
    parallel, _ = assert_equivalent(RESIDUAL, DATA, mesh, constraints)
    assert parallel.specs()["conv1/kernel"] == "R,S(3)"


@pytest.mark.nightly
def test_augmentation_and_noise_layers():
    augmented = network(
        lambda: layers.GaussianNoise(0.1, seed=1),
        lambda: layers.SpatialDropout2D(0.3, seed=2),
        lambda: layers.RandomFlip(seed=3),
        lambda: layers.RandomRotation(0.1, seed=4),
        lambda: layers.RandomZoom(0.1, seed=5),
        lambda: layers.RandomContrast(0.2, seed=6),
        lambda: layers.Resizing(6, 6),
        lambda: layers.Conv2D(4, 3, name="conv"),
        lambda: layers.AveragePooling2D(2),
    )
    assert_equivalent(augmented, DATA, tap.split([3]), batch_size=8)
