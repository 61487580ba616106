"""The noise of roundings: as large as the dtype's, in every sum of the step, and nowhere else."""

from __future__ import annotations

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfpar.observability.verification import noise
from tfpar.observability.verification.noise import rounding_noise

rng = np.random.default_rng(0)


def noisy(function):
    def run(*arguments):
        with rounding_noise():
            return function(*arguments)

    return tf.function(run, autograph=False)


def moved(function, *arguments) -> float:
    """How far noise moves the result, relative to its size."""
    plain = np.asarray(tf.function(function, autograph=False)(*arguments)).astype("float64")
    apart = np.asarray(noisy(function)(*arguments)).astype("float64") - plain
    return float(np.sqrt(np.mean(apart**2) / np.mean(plain**2)))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_noise_is_that_of_the_dtype(dtype):
    x = tf.cast(rng.normal(size=(64, 64)), dtype)
    epsilon = float(ml_dtypes.finfo(x.dtype.as_numpy_dtype).eps)
    assert 0.5 * epsilon < moved(tf.matmul, x, x) < 5 * epsilon
    # Of numbers that cancel it is as large as that of what is added up.
    pairs = tf.concat([x, -x], 0)
    total = noisy(lambda x: tf.reduce_sum(x, 0))(pairs)
    assert epsilon < float(np.std(np.asarray(total).astype("float64"))) < 50 * epsilon


def _bias_gradient(x):
    return tf.raw_ops.BiasAddGrad(out_backprop=x)


def _scattered(x):
    return tf.scatter_nd(tf.zeros((x.shape[0], 1), tf.int32), x, (1, 3))


@pytest.mark.parametrize(
    ("total", "dtype"),
    [
        (_bias_gradient, "bfloat16"),
        (lambda x: tf.reduce_sum(x, 0), "float16"),
        (_scattered, "bfloat16"),
        (_scattered, "float16"),
    ],
)
def test_a_sum_that_stands_still_moves_as_far_as_it_is_off(total, dtype):
    """Of many numbers of one sign, added up one by one in 16 bits."""
    x = tf.cast(rng.uniform(0.5, 1.0, (4096, 3)) / 16, dtype)
    exact = np.asarray(x).astype("float64").sum(0)
    off = np.abs(np.asarray(total(x)).astype("float64") - exact) / exact
    epsilon = float(ml_dtypes.finfo(x.dtype.as_numpy_dtype).eps)
    assert off.min() > 20 * epsilon, "the kernel adds in a wider precision by now"
    far = np.mean([moved(total, x) for _ in range(8)])
    assert far > 0.3 * off.mean()


def test_what_comes_of_no_sum_is_cast_exactly():
    """The decays of an optimizer, of which it takes small differences: no mesh makes another."""

    def left(x):
        return 1 - tf.cast(x, tf.float16)

    x = tf.constant([0.999, 0.99])
    np.testing.assert_array_equal(noisy(left)(x), left(x))
    assert moved(lambda x: left(tf.reduce_sum(x, keepdims=True)), x / 4) > 1e-4

    def through_a_variable(x):
        variable.assign(tf.reduce_sum(x, 0))
        return tf.cast(variable, tf.float16)

    variable = tf.Variable(tf.zeros(2))
    assert moved(through_a_variable, tf.constant(rng.normal(size=(9, 2)), tf.float32)) > 1e-5


def test_noise_is_drawn_anew_by_each_run():
    x = tf.constant(rng.normal(size=(8, 8)), tf.float32)
    run = noisy(tf.matmul)
    assert np.any(run(x, x) != run(x, x))


def test_only_sums_of_real_numbers_have_noise():
    x, counts = tf.constant([1.5, 2.5]), tf.constant([3, 4])
    run = noisy(lambda x, counts: (tf.tanh(x) + x * x, tf.reduce_sum(counts)))
    got, total = run(x, counts)
    np.testing.assert_array_equal(got, tf.tanh(x) + x * x)
    assert int(total) == 7


def test_loops_branches_and_gradients_have_noise():
    x = tf.constant(rng.normal(size=(4, 4)), tf.float32)

    def loop(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.matmul(x, y)), [0, x])[1]

    def branch(x):
        return tf.cond(x[0, 0] < 9.0, lambda: tf.matmul(x, x), lambda: x)

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.sin(loop(x)))
        return tape.gradient(y, x)

    for function in (loop, branch, gradient):
        assert moved(function, x) > 1e-8, function


def test_functions_that_others_call_too_stay_as_they_are():
    inner = tf.function(lambda x: tf.matmul(x, x))
    x = tf.constant(rng.normal(size=(8, 8)), tf.float32)
    noisy(inner)(x)
    np.testing.assert_array_equal(inner(x), inner(x))
    np.testing.assert_array_equal(inner(x), tf.matmul(x, x))


def test_products_on_gpus_may_be_in_tf32(monkeypatch):
    x = tf.constant(rng.normal(size=(32, 32)), tf.float32)
    before = moved(tf.matmul, x, x), moved(lambda x: tf.reduce_sum(x, 0), x)
    monkeypatch.setattr(noise.tf.config, "list_logical_devices", lambda kind: [kind])
    after = moved(tf.matmul, x, x), moved(lambda x: tf.reduce_sum(x, 0), x)
    assert after[0] > 1000 * before[0] and after[1] < 10 * before[1]


def test_a_layer_is_left_without_noise():
    layer = keras.layers.Dense(3)
    x = tf.constant(rng.normal(size=(4, 2)), tf.float32)
    want = np.array(layer(x))
    noisy(layer)(x)
    np.testing.assert_array_equal(layer(x), want)
