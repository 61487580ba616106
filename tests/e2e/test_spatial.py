"""Images cut into bands of rows, one for each rank, train as on one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.equivalence import assert_equivalent

SIZE, CHANNELS, CLASSES, BATCH = 16, 4, 5, 4

rng = np.random.default_rng(0)
PIXELS = (
    rng.normal(size=(2 * BATCH, SIZE, SIZE, 3)).astype("float32"),
    rng.integers(0, CLASSES, (2 * BATCH, SIZE, SIZE)).astype("int32"),
)
IMAGES = PIXELS[0], PIXELS[1][:, 0, 0]
ROWS = tap.shard_output("pixels", 1, "rows")
MESHES = {"rows": tap.Mesh(("data", "rows"), (1, 2)), "both": tap.Mesh(("data", "rows"), (2, 2))}


def block(x, channels, name):
    x = layers.Conv2D(channels, 3, padding="same", use_bias=False, name=f"{name}_conv")(x)
    return layers.ReLU(name=f"{name}_relu")(layers.BatchNormalization(name=f"{name}_norm")(x))


def compiled(inputs, outputs):
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, 0.9), loss, metrics=["accuracy"], jit_compile=False)
    return model


def unet():
    images = keras.Input((SIZE, SIZE, 3))
    x = layers.Rescaling(2.0, name="pixels")(images)
    skip = x = block(x, CHANNELS, "down")
    x = layers.MaxPooling2D(3, 2, padding="same", name="pool")(x)
    x = block(x, 2 * CHANNELS, "bottom")
    x = layers.UpSampling2D(name="grow")(x)
    x = layers.Concatenate(name="skip")([skip, x])
    x = layers.Conv2DTranspose(CHANNELS, 3, padding="same", name="mix")(x)
    return compiled(images, layers.Conv2D(CLASSES, 1, name="head")(x))


def classifier():
    images = keras.Input((SIZE, SIZE, 3))
    x = layers.Rescaling(2.0, name="pixels")(images)
    x = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(block(x, CHANNELS, "first"))
    second = layers.Conv2D(CHANNELS, 3, strides=2, padding="same", name="second")(x)
    x = second + layers.AveragePooling2D(2, name="shortcut")(x)
    x = layers.GlobalAveragePooling2D(name="mean")(x)
    return compiled(images, layers.Dense(CLASSES, name="head")(x))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [nightly("rows"), "both"])
def test_a_unet_in_bands_of_rows(mesh):
    parallel, _ = assert_equivalent(unet, PIXELS, MESHES[mesh], [ROWS], batch_size=BATCH, rtol=1e-3)
    gathers_only_edges(parallel, BATCH // MESHES[mesh].shape[0])
    ran = {op.name: d.strategy for op, d in parallel.executable().partitioned.decisions.items()}
    convolutions = [c for name, c in ran.items() if name.endswith(("/convolution", "_transpose"))]
    assert convolutions and all(c.out_specs[0][1] == tap.Shard(1) for c in convolutions)


@pytest.mark.slow
def test_a_classifier_in_bands_of_rows():
    parallel, _ = assert_equivalent(
        classifier, IMAGES, MESHES["both"], [ROWS], batch_size=BATCH, rtol=1e-3
    )
    gathers_only_edges(parallel, BATCH // 2)


def gathers_only_edges(trained, batch):
    """Beside sums, what crosses ranks is at most a row each way of two blocks, of all channels."""
    edges = 2 * 2 * batch * SIZE * 3 * CHANNELS * 4
    assert trained.exchanged()
    for kind, axes, size in trained.exchanged():
        assert kind == "all_gather" and axes == ("rows",) and size <= edges, (kind, axes, size)
