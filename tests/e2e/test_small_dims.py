"""Dims with fewer entries than ranks: constraints that match widely meet them.

So does the batch: the last one is of one sample.
"""

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.equivalence import assert_equivalent

rng = np.random.default_rng(0)


def images(n=9):
    x = rng.normal(size=(n, 8, 8, 2)).astype("float32")
    return x, rng.normal(size=(n, 2)).astype("float32")


def separable():
    """Depthwise kernels end in a dim of one entry; two channels meet four ranks."""
    inputs = keras.Input((8, 8, 2))
    x = layers.DepthwiseConv2D(3, name="depthwise")(inputs)
    x = layers.SeparableConv2D(4, 3, activation="relu", name="separable")(x)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [[2, 2], nightly([1, 2]), nightly([1, 4])])
def test_every_kernel_by_its_last_dim(mesh):
    constraints = [tap.shard(".*kernel", dim=-1, axis="model")]
    parallel, _ = assert_equivalent(separable, images(), tap.split(mesh), constraints, batch_size=8)
    specs = parallel.specs()
    assert specs["depthwise/kernel"] == specs["separable/depthwise_kernel"] == "R,R"
    assert specs["head/kernel"] == "R,S(1)"


@pytest.mark.slow
def test_one_dim_over_more_ranks_than_it_has_entries():
    constraints = [
        tap.shard("head/kernel", dim=1, axis="data"),
        tap.shard("head/kernel", dim=1, axis="model"),
    ]
    parallel, _ = assert_equivalent(
        separable, images(8), tap.split([2, 2]), constraints, batch_size=8
    )
    assert parallel.specs()["head/kernel"] == "S(1),R"
