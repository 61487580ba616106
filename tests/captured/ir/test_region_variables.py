"""What a region only reads is read before it, and nothing else is."""

import numpy as np
import tensorflow as tf

from tfpar.ir import walk_functions
from tfpar.tf.interop import convert_func_graph


def convert(function, *specs):
    return convert_func_graph(tf.function(function).get_concrete_function(*specs).graph)


def body_types(graph, op):
    return [inner.type for _, body in walk_functions(graph, op) for inner in body.ops]


def test_weights_of_a_loop_are_read_before_it():
    kernel, table = tf.Variable(np.eye(4, dtype="float32")), tf.Variable(tf.zeros((7, 4)))

    def step(x, ids):
        def body(i, x):
            return i + 1, tf.tanh(x @ kernel) + tf.gather(table, ids)

        return tf.while_loop(lambda i, _: i < 3, body, (0, x))[1]

    graph = convert(step, tf.TensorSpec((5, 4)), tf.TensorSpec((5,), tf.int32))
    (loop,) = [op for op in graph.ops if op.type in ("While", "StatelessWhile")]
    assert all(t.dtype != "resource" for t in loop.inputs)
    types = body_types(graph, loop)
    assert "ReadVariableOp" not in types and "ResourceGather" not in types
    assert types.count("GatherV2") == 1
    reads = [op for op in graph.ops if op.type == "ReadVariableOp"]
    assert len(reads) == 2 and all(graph.ops.index(r) < graph.ops.index(loop) for r in reads)


def test_what_a_loop_writes_stays_inside():
    total = tf.Variable(0.0)

    def step(x):
        def body(i):
            total.assign_add(tf.reduce_sum(x) * total)
            return i + 1

        return tf.while_loop(lambda i: i < 3, body, (0,))

    graph = convert(step, tf.TensorSpec((5, 4)))
    (loop,) = [op for op in graph.ops if op.type == "While"]
    assert [t.dtype for t in loop.inputs].count("resource") == 1
    assert "AssignAddVariableOp" in body_types(graph, loop)


def test_what_a_loop_hands_through_is_read_at_its_source():
    def step(x, w):
        def body(i, x, w):
            return i + 1, x @ w, w

        _, x, w_after = tf.while_loop(lambda i, *_: i < 2, body, (0, x, w))
        return x, w_after

    graph = convert(step, tf.TensorSpec((5, 4)), tf.TensorSpec((4, 4)))
    sources = {t.op.inputs[0].op.type for t in graph.outputs}
    assert sources == {"StatelessWhile", "Placeholder"}
