"""Branches that write: straight-line ops, the same values, whatever branch is taken."""

import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tfpar.ir.passes.predicate_branches import predicate_branches
from tfpar.ir.passes.trim import trim
from tfpar.tf.interop import convert_func_graph

X = np.arange(12, dtype="float32").reshape(4, 3)


def make():
    """(variables, step): nested branches over every kind of write, in an order that matters."""
    rows, total, count = tf.Variable(X), tf.Variable(tf.zeros([3])), tf.Variable(0)

    def step(x):
        mean = tf.reduce_mean(x)

        def positive():
            rows.scatter_sub(tf.IndexedSlices(x[:2], tf.constant([1, 1])))
            total.assign(tf.reduce_sum(rows, 0) / tf.norm(x))
            tf.cond(mean > 2.0, lambda: count.assign_add(10), lambda: count.assign_sub(1))
            total.assign_add(total * tf.cast(count, tf.float32))
            return tf.reduce_sum(total)

        def negative():
            before = tf.reduce_sum(total)
            total.assign(tf.math.log(total))  # not a number where the other branch is taken
            rows.scatter_update(tf.IndexedSlices(x[:2], tf.constant([0, 3])))
            count.assign(count * 2)
            return before

        out = tf.cond(mean > 0.0, positive, negative)
        total.assign_add(tf.ones([3]))
        return out + tf.reduce_sum(rows)

    return (rows, total, count), step


@pytest.mark.parametrize("mesh", [[2], [3], [2, 2]])
def test_same_values_in_either_branch(mesh):
    variables, step = make()
    with tap.auto_parallel(mesh, [tap.batch("data"), tap.shard("Variable", dim=0, axis="data")]):
        sharded, inner = make()
        parallel = tap.function(inner)
    plain = tf.function(step)
    for scale in (1.0, -1.0, 0.1, -2.0, 3.0):
        x = (X + 1) * np.float32(scale)
        np.testing.assert_allclose(parallel(x), plain(x), rtol=1e-5)
        for got, want in zip(sharded, variables, strict=True):
            np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5)


def test_no_branch_is_left():
    _, step = make()
    graph = convert_func_graph(tf.function(step).get_concrete_function(tf.TensorSpec([4, 3])).graph)
    graph = predicate_branches(trim(graph).graph)
    assert not graph.functions and not any(op.type in ("If", "StatelessIf") for op in graph.ops)


def test_other_effects_stay_in_their_branch():
    v, calls = tf.Variable(0.0), []

    def step(x):
        def then():
            tf.numpy_function(lambda: calls.append(1), [], [])
            v.assign_add(1.0)

        tf.cond(x > 0.0, then, lambda: None)

    graph = convert_func_graph(tf.function(step).get_concrete_function(tf.TensorSpec([])).graph)
    graph = predicate_branches(trim(graph).graph)
    assert [op.type for op in graph.ops].count("If") == 1
