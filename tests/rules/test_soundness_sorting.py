"""TopK, ArgMax, InTopK and running sums against the plain ops, ties included."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import MESHES, check, sweep, was_split
from tfpar.spec import Mesh, Shard

rng = np.random.default_rng(0)
UNEVEN = (*MESHES, Mesh.of([4]))


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def tied(*shape):
    return rng.integers(-1, 2, size=shape).astype("float32")


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_arg_max_and_arg_min(axis):
    x = tied(5, 3, 7)
    x[1, 1, 2:] = -np.inf
    x[2, 2, 1] = np.inf
    runs = sweep(
        lambda a: [tf.argmax(a, axis), tf.argmin(a, axis, output_type=tf.int32)],
        [x],
        trials=4,
        meshes=UNEVEN,
        partial=False,
    )
    assert was_split(runs, "ArgMax", "n") and was_split(runs, "ArgMin", "n")
    assert was_split(runs, "ArgMax", "d2" if axis != -1 else "d0")


def test_arg_max_of_rows_with_nan_and_of_integers():
    x = f(4, 6)
    x[0, 0] = x[1, 5] = x[2, 3] = np.nan
    x[3] = -np.inf
    sweep(lambda a: tf.argmax(a, 1), [x], trials=3, partial=False)
    sweep(lambda a: tf.argmin(a, 1), [x], trials=3, partial=False)
    sweep(lambda a: tf.argmax(a, 1), [rng.integers(-3, 3, size=(4, 7))], trials=3)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, 7])
def test_top_k(k):
    def function(x):
        integers = tf.cast(x, tf.int32)
        return [*tf.math.top_k(x, k), *tf.math.top_k(integers, k, index_type="int64")]

    runs = sweep(function, [tied(2, 4, 7)], trials=5, meshes=UNEVEN, partial=False)
    assert was_split(runs, "TopKV2", "n") and was_split(runs, "TopKV2", "_0")


def test_top_k_where_the_lowest_value_is_real():
    x = np.full((3, 10), -np.inf, "float32")
    x[0, 7] = 1
    x[1, 9] = x[1, 2] = 0
    for mesh in (Mesh.of([2, 2]), Mesh.of([4])):
        spec = (Shard(1),) * mesh.num_axes  # of 10 entries: padding between real ones
        run = check(lambda a: tf.math.top_k(a, 4), [x], [spec], mesh)
        assert was_split([run], "TopKV2", "n")


def test_top_k_gradient_and_sort():
    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.math.top_k(x, 2).values
            loss = tf.reduce_sum(y * y)
        return [y, tape.gradient(loss, x), tf.sort(x), tf.argsort(x, direction="DESCENDING")]

    sweep(function, [f(5, 6)], trials=4, meshes=UNEVEN)


@pytest.mark.slow
def test_in_top_k():
    x = f(6, 7)
    x[1] = tied(7)
    x[2, 4] = np.inf
    x[3, 0] = np.nan
    targets = np.array([0, 3, 5, 6, 7, -1])
    for k in (1, 3, 7):

        def function(p, t, k=k):
            return tf.raw_ops.InTopKV2(predictions=p, targets=t, k=k)

        runs = sweep(function, [x, targets], trials=3, meshes=UNEVEN, partial=False)
        assert was_split(runs, "InTopKV2", "b") and was_split(runs, "InTopKV2", "c")


def test_running_sums():
    def function(x):
        return [
            tf.cumsum(x, 1),
            tf.cumsum(x, 1, exclusive=True, reverse=True),
            tf.math.cumprod(x, 0),
            tf.math.cumulative_logsumexp(x, 1),
        ]

    runs = sweep(function, [f(5, 6)], trials=4)
    assert was_split(runs, "Cumsum", "d0") and was_split(runs, "Cumprod", "d1")


def test_older_kinds_and_nth_element():
    targets = np.array([0, 3, 5, 6, 2], "int32")
    runs = sweep(
        lambda p, t: [
            tf.raw_ops.InTopK(predictions=p, targets=t, k=2),
            tf.raw_ops.NthElement(input=p, n=3),
            tf.math.reduce_euclidean_norm(p, 1),
        ],
        [f(5, 7), targets],
        trials=4,
        partial=False,
    )
    assert was_split(runs, "InTopK", "c")
    assert was_split(runs, "NthElement", "_0") and was_split(runs, "EuclideanNorm", "d0")
