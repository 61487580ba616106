"""Contractions, reductions and reshapes against the plain ops."""

import numpy as np
import tensorflow as tf

from tests.partitioned import sweep, was_split

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def test_matmul():
    runs = sweep(lambda a, b: tf.matmul(a, b), [f(6, 5), f(5, 4)])
    assert all(was_split(runs, "MatMul", k) for k in "ijk")
    sweep(lambda a, b: tf.matmul(a, b, transpose_a=True), [f(5, 6), f(5, 4)], trials=4)


def test_batch_matmul_broadcasts():
    runs = sweep(lambda a, b: tf.matmul(a, b, transpose_b=True), [f(2, 3, 4, 5), f(3, 6, 5)])
    assert all(was_split(runs, "BatchMatMulV2", k) for k in ("i", "j", "k", "_0", "_1"))


def test_einsum():
    runs = sweep(lambda a, b: tf.einsum("gsm,egcm->egcs", a, b), [f(2, 3, 4), f(5, 2, 3, 4)])
    assert all(was_split(runs, "Einsum", k) for k in "gsmec")


def test_reductions():
    x = f(4, 3, 5)
    for function in (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_prod):
        sweep(lambda a, g=function: (g(a, [0, 2]), g(a), g(a, 1, keepdims=True)), [x], trials=5)


def test_reshape_follows_nested_factors():
    x = f(4, 6, 10)
    shapes = (
        (24, 10),
        (4, 60),
        (2, 2, 6, 10),
        (4, 2, 3, 10),
        (8, 30),
        (240,),
        (4, 6, 5, 2),
        (3, 80),
    )
    runs = sweep(lambda a: [tf.reshape(tf.reshape(a, s), [-1, 5]) for s in shapes], [x])
    assert was_split(runs, "Reshape", "f0") and was_split(runs, "Reshape", "f1")


def test_squeeze_keeps_dims_that_are_one_on_a_rank_only():
    sweep(lambda a: tf.squeeze(tf.reshape(a, [1, 4, 1, 2])), [f(4, 2)], trials=4)
