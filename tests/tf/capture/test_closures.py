"""What a step reads besides its arguments: small and large tensors, variables, other resources."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tests.equivalence import assert_equivalent

rng = np.random.default_rng(0)
X = rng.normal(size=(8, 6)).astype("float32")


@pytest.mark.slow
@pytest.mark.parametrize("size", [6, 300])
def test_layers_may_hold_plain_tensors(size):
    """TensorFlow captures small tensors by value and large ones as inputs."""
    x = rng.normal(size=(8, size)).astype("float32")

    def build():
        normalization = keras.layers.Normalization(
            mean=np.full(size, 0.5), variance=np.full(size, 0.2)
        )
        model = keras.Sequential([keras.Input((size,)), normalization, keras.layers.Dense(3)])
        model.compile("sgd", "mse", jit_compile=False)
        return model

    assert_equivalent(build, (x, x[:, :3]), tap.split([2]), batch_size=4)


def test_a_lookup_table_that_never_changes_is_read_by_every_rank():
    with tap.auto_parallel([2]):
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)

        @tap.function
        def step(x):
            return table.lookup(x)

    np.testing.assert_array_equal(step(tf.constant([1, 1, 3, 1])), [2, 2, 0, 2])


def test_an_initializer_may_hold_a_tensor():
    values = tf.range(6.0)
    with tap.auto_parallel([2]):
        variable = tf.Variable(lambda: values * 2)
    np.testing.assert_array_equal(variable, 2 * np.arange(6))
