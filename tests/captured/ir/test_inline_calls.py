"""Calls dissolve, and what ran after them runs after what they did."""

import tensorflow as tf

from tests.partitioned import check
from tfpar.spec import Mesh, Replicate, Shard
from tfpar.tf.interop import convert_func_graph


def convert(function, *specs):
    return convert_func_graph(tf.function(function).get_concrete_function(*specs).graph)


def test_nested_calls_dissolve():
    @tf.function
    def inner(x):
        return tf.tanh(x), x

    @tf.function
    def outer(x):
        a, b = inner(x * 2.0)
        return a + b

    graph = convert(lambda x: outer(x) - inner(x)[0], tf.TensorSpec([4, 3]))
    assert not graph.functions
    types = [op.type for op in graph.ops]
    assert types.count("Tanh") == 2 and "PartitionedCall" not in types
    assert any("/" in op.name for op in graph.ops if op.type == "Tanh")


def test_effects_keep_their_order():
    v = tf.Variable(1.0)

    @tf.function
    def bump(by):
        v.assign_add(by)

    def step(x):
        before = v.read_value()
        bump(x)
        after = v.read_value()
        return before, after

    graph = convert(step, tf.TensorSpec([]))
    assigns = [op for op in graph.ops if op.type == "AssignAddVariableOp"]
    reads = [op for op in graph.ops if op.type == "ReadVariableOp"]
    assert len(assigns) == 1 and len(reads) == 2
    assert assigns[0] in reads[1].control and reads[0] in assigns[0].control
    assert assigns[0] in graph.effects


def test_calls_that_xla_must_compile_stay():
    @tf.function(jit_compile=True)
    def compiled(x):
        return tf.tanh(x)

    graph = convert(lambda x: compiled(x), tf.TensorSpec([4, 3]))
    assert [op.type for op in graph.ops if "Call" in op.type]
    assert len(graph.functions) == 1


def test_gradient_of_a_call_is_sharded_with_it():
    @tf.function
    def layer(x, w):
        return tf.tanh(x @ w)

    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_sum(layer(x, w) ** 2)
        return loss, tape.gradient(loss, w)

    mesh = Mesh.of([2])
    x, w = tf.random.stateless_normal([6, 4], [1, 2]).numpy(), tf.eye(4).numpy()
    result = check(step, [x, w], [(Shard(0),), (Replicate(),)], mesh)
    assert {kind for kind, _, _ in result.partitioned.collectives()} == {"all_reduce"}
