"""Contractions, reductions and reshapes against the plain ops."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import sweep, was_split

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


@pytest.mark.slow
def test_matmul():
    runs = sweep(lambda a, b: tf.matmul(a, b), [f(6, 5), f(5, 4)])
    assert all(was_split(runs, "MatMul", k) for k in "ijk")
    sweep(lambda a, b: tf.matmul(a, b, transpose_a=True), [f(5, 6), f(5, 4)], trials=4)


def test_batch_matmul_broadcasts():
    runs = sweep(lambda a, b: tf.matmul(a, b, transpose_b=True), [f(2, 3, 4, 5), f(3, 6, 5)])
    assert all(was_split(runs, "BatchMatMulV2", k) for k in ("i", "j", "k", "_0", "_1"))


def test_versions_of_batch_matmul():
    def function(a, b):
        tall, wide = tf.linalg.matrix_transpose(a), tf.linalg.matrix_transpose(b)
        raw = tf.raw_ops
        return [
            raw.BatchMatMul(x=a, y=b),
            raw.BatchMatMul(x=tall, y=wide, adj_x=True, adj_y=True),
            raw.BatchMatMulV3(x=a, y=b[0], Tout=tf.float32),
            raw.BatchMatMulV3(x=tall, y=b, Tout=tf.float32, adj_x=True),
        ]

    runs = sweep(function, [f(3, 4, 5), f(3, 5, 2)], trials=2)
    for op_type in ("BatchMatMul", "BatchMatMulV3"):
        assert all(was_split(runs, op_type, k) for k in ("i", "k", "_0")), op_type


@pytest.mark.slow
def test_bias_and_its_gradient():
    def function(x, bias, other):
        raw, first = tf.raw_ops, {"data_format": "NCHW"}
        return [
            raw.BiasAdd(value=x, bias=bias),
            raw.BiasAdd(value=x, bias=other, **first),
            raw.BiasAddV1(value=x, bias=bias),
            raw.BiasAddGrad(out_backprop=x),
            raw.BiasAddGrad(out_backprop=x, **first),
        ]

    runs = sweep(function, [f(3, 5, 2, 3), f(3), f(5)], trials=4)
    assert was_split(runs, "BiasAdd", "_2") and was_split(runs, "BiasAdd", "b")
    assert was_split(runs, "BiasAdd", "c") and was_split(runs, "BiasAddV1", "c")
    assert all(was_split(runs, "BiasAddGrad", k) for k in ("r0", "r1", "r2", "c"))


@pytest.mark.slow
def test_einsum():
    runs = sweep(lambda a, b: tf.einsum("gsm,egcm->egcs", a, b), [f(2, 3, 4), f(5, 2, 3, 4)])
    assert all(was_split(runs, "Einsum", k) for k in "gsmec")


@pytest.mark.slow
def test_reductions():
    x = f(4, 3, 5)
    for function in (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_prod):
        sweep(lambda a, g=function: (g(a, [0, 2]), g(a), g(a, 1, keepdims=True)), [x], trials=5)


def test_reductions_of_booleans_and_squares():
    def function(x):
        rare, common = x > 1.2, x > -1.2
        return [
            tf.reduce_any(rare, 0),
            tf.reduce_any(rare, [1, 2]),
            tf.reduce_any(rare, 2, True),
            tf.reduce_all(common, 0),
            tf.reduce_all(common, [1, 2]),
            tf.nn.l2_loss(x),
        ]

    runs = sweep(function, [f(4, 3, 5)], trials=3)
    for op_type in ("Any", "All", "L2Loss"):
        assert all(was_split(runs, op_type, f"r{d}") for d in range(3)), op_type


@pytest.mark.slow
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
