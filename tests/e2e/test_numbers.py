"""Dtypes, sizes and random numbers, against one device."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar as tap
from tests.cases import nightly
from tests.e2e.features import COLUMN, MESH, compiled, f, perceptron, rng, same
from tests.equivalence import traced


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float64", nightly("mixed_bfloat16"), "mixed_float16"])
def test_dtype_policy(policy):
    """Sums in half precision are rounded in another order: only close.

    The plain run is traced, because TensorFlow fuses ops then, which rounds otherwise. The labels
    lie far from what the model gives, so that no gradient cancels out.
    """
    exact = policy == "float64"
    tolerances = {"loss_rtol": 1e-6} if exact else {"rtol": 0.05, "loss_rtol": 2e-2}
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        optimizer = "adam" if exact else "sgd"
        data = f(12, 6), 3 + f(12, 2)
        parallel, _ = same(lambda: perceptron(optimizer), data, plainly=traced, **tolerances)
    finally:
        keras.config.set_dtype_policy(before)
    scaled = isinstance(parallel.model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")


@pytest.mark.slow
def test_inputs_of_many_dtypes():
    def build():
        kinds = ("uint8", "int64", "bool", "float16", "float64")
        inputs = [keras.Input((4,), dtype=kind, name=kind) for kind in kinds]
        x = ops.concatenate([ops.cast(t, "float32") for t in inputs], axis=-1)
        return compiled(inputs, layers.Dense(2)(layers.Dense(10, name="fc1")(x)))

    x = [
        rng.integers(0, 9, (10, 4)).astype("uint8"),
        rng.integers(0, 9, (10, 4)),
        rng.integers(0, 2, (10, 4)).astype("bool"),
        f(10, 4).astype("float16"),
        rng.normal(size=(10, 4)),
    ]
    same(build, (x, f(10, 2)), batch_size=5)


@pytest.mark.slow
def test_sparse_inputs():
    """Fed dense, sparse in the step: the numbers of values differ from batch to batch."""

    def build():
        x = keras.Input((6,), sparse=True)
        return compiled(x, layers.Dense(2)(layers.Dense(10, name="fc1")(x)))

    x = tf.sparse.from_dense(np.where(f(8, 6) > 0.5, f(8, 6), 0))
    data = tf.data.Dataset.from_tensor_slices((x, f(8, 2))).batch(4)
    runs = []
    for scope in (contextlib.nullcontext, lambda: tap.auto_parallel(MESH, COLUMN, planner=None)):
        keras.utils.set_random_seed(7)
        with scope():
            model = build()
        model.fit(data, epochs=2, verbose=0)
        runs.append(model.get_weights())
    for got, want in zip(*runs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [nightly([4]), nightly([1, 4]), nightly([3]), [2, 1, 2]])
def test_meshes_and_batches(mesh):
    """Batches of 5, 5 and 1; sizes that no mesh divides."""
    mesh = tap.split(mesh, ("data", "model", "more")[: len(mesh)])
    constraints = COLUMN if "model" in mesh.axis_names else ()
    same(perceptron, (f(11, 6), f(11, 2)), constraints, mesh, batch_size=5)


@pytest.mark.slow
def test_random_layers_draw_what_one_device_draws():
    def build():
        x = keras.Input((8, 6))
        h = layers.Dense(10, "tanh", name="fc1")(x)
        h = layers.Dropout(0.4, seed=1)(h)
        h = layers.SpatialDropout1D(0.3, seed=2)(h)
        h = layers.GaussianNoise(0.1, seed=3)(h)
        h = layers.GaussianDropout(0.2, seed=4)(h)
        h = layers.AlphaDropout(0.2, seed=5)(h)
        h = layers.Dropout(0.5, noise_shape=(None, 1, 10), seed=6)(h)
        return compiled(x, layers.Dense(2)(h))

    same(build, (f(5, 8, 6), f(5, 8, 2)), epochs=2)  # the last batch is of one sample


@pytest.mark.slow
def test_unseeded_layers_follow_the_global_seed():
    def build():
        x = keras.Input((6,))
        h = layers.Dropout(0.4)(layers.Dense(10, "tanh", name="fc1")(x))
        return compiled(x, layers.Dense(2)(layers.Dropout(0.4)(h)))

    same(build, (f(12, 6), f(12, 2)), epochs=2)


@pytest.mark.slow
def test_preprocessing_layers_in_the_model():
    images = rng.integers(0, 255, (8, 8, 8, 3)).astype("uint8")

    def build():
        x = keras.Input((8, 8, 3), dtype="uint8")
        h = layers.Rescaling(1 / 127.5, offset=-1.0)(x)
        h = layers.Normalization(mean=[0.1, 0.2, 0.3], variance=[1.0, 2.0, 3.0])(h)
        h = layers.RandomFlip("horizontal_and_vertical", seed=1)(h)
        h = layers.RandomTranslation(0.2, 0.2, seed=2)(h)
        h = layers.RandomRotation(0.1, seed=3)(h)
        h = layers.RandomZoom(0.2, seed=4)(h)
        h = layers.RandomContrast(0.2, seed=5, value_range=(-1, 1))(h)
        h = layers.CenterCrop(6, 6)(h)
        h = layers.Resizing(5, 5)(h)
        h = layers.Dense(10, name="fc1")(layers.Flatten()(h))
        return compiled(x, layers.Dense(2)(h))

    same(build, (images, f(8, 2)), rtol=5e-3)
