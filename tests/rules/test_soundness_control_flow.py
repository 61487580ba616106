"""Loops, branches and calls against the plain functions, gradients included."""

import numpy as np
import pytest
import tensorflow as tf

from tests import partitioned
from tests.partitioned import check
from tfpar.ir import Variable
from tfpar.propagation import Anchors, prepare, propagate
from tfpar.spec import Mesh, Replicate, Shard
from tfpar.tf.interop import convert_func_graph

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def sweep(function, args, trials=2):
    """Gradients of loops take a while to compile: one uneven mesh and one of two axes."""
    meshes = (Mesh.of([3]), Mesh.of([2, 2]))
    return partitioned.sweep(function, args, trials=trials, meshes=meshes)


def gradients(function):
    """`function` (to a scalar first) with the gradients of its arguments."""

    def wrapped(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            out = function(*args)
        return out, *tape.gradient(out, args, unconnected_gradients="zero")

    return wrapped


def data_parallel(function, args, size=2):
    """Run with the first argument split on its first dim; the collectives by kind."""
    whole = (Replicate(),)
    result = check(function, args, [(Shard(0),), *[whole] * (len(args) - 1)], Mesh.of([size]))
    kinds: dict[str, list[int]] = {}
    for kind, _, size in result.partitioned.collectives():
        kinds.setdefault(kind, []).append(size)
    return result, kinds


def assert_sharded(result, kinds, gathered=()):
    """No region ran whole, and nothing but the outputs of `gathered` bytes was gathered."""
    assert not result.partitioned.replicated_regions
    assert sorted(kinds.get("all_gather", [])) == sorted(gathered)


@pytest.mark.slow
def test_branches():
    def branches(x, w):
        return tf.cond(
            tf.reduce_sum(x) > 0.0,
            lambda: tf.reduce_sum(tf.tanh(x @ w) ** 2),
            lambda: tf.reduce_mean(tf.sigmoid(x @ w)),
        )

    for sign in (1.0, -1.0):
        sweep(gradients(branches), [sign * np.abs(f(5, 4)), f(4, 6)])
        result, kinds = data_parallel(gradients(branches), [sign * np.abs(f(6, 4)), f(4, 6)])
        assert_sharded(result, kinds, gathered=[6 * 4 * 4])


def test_switch_case():
    def switch(i, x):
        return tf.switch_case(
            i, [lambda: tf.nn.relu(x), lambda: x * 2.0, lambda: tf.reduce_sum(x) + tf.zeros_like(x)]
        )

    for i in range(3):
        sweep(switch, [np.int32(i), f(5, 4)])


def recurrent(x, w, u):
    """h' = tanh(x_t w + h u) over the second dim of x, reading and writing TensorArrays."""
    steps = x.shape[1]
    inputs = tf.TensorArray(tf.float32, steps).unstack(tf.transpose(x, [1, 0, 2]))
    outputs = tf.TensorArray(tf.float32, steps, element_shape=(x.shape[0], u.shape[0]))

    def body(t, h, out):
        h = tf.tanh(inputs.read(t) @ w + h @ u)
        return t + 1, h, out.write(t, h)

    start = (tf.constant(0), tf.zeros([x.shape[0], u.shape[0]]), outputs)
    _, h, out = tf.while_loop(lambda t, h, out: t < steps, body, start)
    return tf.reduce_sum(tf.transpose(out.stack(), [1, 0, 2]) ** 2) + tf.reduce_sum(h)


@pytest.mark.slow
def test_recurrent_loop():
    args = [f(5, 3, 4), f(4, 6), f(6, 6)]
    sweep(gradients(recurrent), args)
    args = [f(6, 3, 4), f(4, 6), f(6, 6)]
    result, kinds = data_parallel(gradients(recurrent), args)
    assert_sharded(result, kinds, gathered=[6 * 3 * 4 * 4])


def test_weights_that_shard_are_gathered_before_the_loop():
    args = [f(6, 3, 4), f(4, 6), f(6, 6)]
    mesh = Mesh.of([2])
    # As with ZeRO-3: the batch and the weights are split over the same axis.
    variables = [tf.Variable(a) for a in args[1:]]

    def step(x):
        with tf.GradientTape() as tape:
            loss = recurrent(x, *variables)
        return loss, *tape.gradient(loss, variables)

    concrete = tf.function(step).get_concrete_function(tf.TensorSpec(args[0].shape))
    graph = convert_func_graph(concrete.graph)
    for tensor, variable in zip(graph.inputs[1:], variables, strict=True):
        graph.variables.append(Variable(variable.name, tensor.shape, "float32", True, tensor))
    graph.inputs = graph.inputs[:1]
    anchors = Anchors({v.name: (Shard(0),) for v in variables}, [(Shard(0),)])
    partitioned = propagate(prepare(graph), mesh, anchors)
    assert not partitioned.replicated_regions
    # Each weight is gathered once for both loops, each gradient reduced once.
    gathers = [size for kind, _, size in partitioned.collectives() if kind == "all_gather"]
    assert sorted(gathers) == [4 * 6 * 4, 6 * 6 * 4]
    reduces = [size for kind, _, size in partitioned.collectives() if kind == "all_reduce"]
    assert sorted(reduces) == [4, 4 * 6 * 4, 6 * 6 * 4]


def test_loop_that_needs_a_collective_runs_whole():
    def normalise(x):
        def body(i, x):
            return i + 1, x / tf.norm(x)

        return tf.while_loop(lambda i, x: i < 3, body, (0, x))[1]

    sweep(normalise, [f(5, 4)])
    result, _ = data_parallel(normalise, [f(6, 4)])
    regions = result.partitioned.replicated_regions
    assert [(op.type, axis) for op, axis in regions] == [("StatelessWhile", 0)]


def test_loop_until_converged():
    def shrink(x):
        return tf.while_loop(lambda x: tf.reduce_sum(x * x) > 1e-2, lambda x: (x * 0.5,), (x,))[0]

    sweep(shrink, [f(5, 4)])


@pytest.mark.slow
def test_nested_loops():
    def nested(x, w):
        def outer(i, x):
            def inner(j, x):
                return j + 1, tf.tanh(x @ w)

            return i + 1, tf.while_loop(lambda j, x: j < 2, inner, (0, x))[1] + x

        return tf.reduce_sum(tf.while_loop(lambda i, x: i < 2, outer, (0, x))[1] ** 2)

    sweep(gradients(nested), [f(5, 4), f(4, 4)])
    result, kinds = data_parallel(gradients(nested), [f(6, 4), f(4, 4)])
    assert_sharded(result, kinds, gathered=[6 * 4 * 4])


@pytest.mark.slow
def test_branch_inside_a_loop():
    def mixed(x, w):
        def body(i, x):
            return i + 1, tf.cond(i % 2 == 0, lambda: tf.tanh(x @ w), lambda: tf.nn.relu(x @ w))

        return tf.reduce_sum(tf.while_loop(lambda i, x: i < 3, body, (0, x))[1] ** 2)

    sweep(gradients(mixed), [f(5, 4), f(4, 4)])
    result, kinds = data_parallel(gradients(mixed), [f(6, 4), f(4, 4)])
    assert_sharded(result, kinds, gathered=[6 * 4 * 4])


def test_lists_in_a_straight_line():
    def straight(x, y):
        array = tf.TensorArray(tf.float32, 3, element_shape=(5, 4))
        array = array.write(0, x).write(2, y)
        values = array.stack()
        return values, array.read(0) * 2.0, array.gather([2, 0])

    sweep(straight, [f(5, 4), f(5, 4)], trials=6)


@pytest.mark.slow
def test_lists_are_made_anew_for_a_loop():
    def scan(x, w):
        rows = tf.TensorArray(tf.float32, 4).unstack(tf.transpose(x, [1, 0, 2]))
        sums = tf.TensorArray(tf.float32, 4, element_shape=(x.shape[0], 6)).write(
            0, tf.zeros((x.shape[0], 6))
        )

        def body(i, sums):
            return i + 1, sums.write(i, tf.tanh(rows.read(i - 1) @ w) + sums.read(i - 1))

        return tf.reduce_sum(tf.while_loop(lambda i, _: i < 4, body, (1, sums))[1].stack() ** 2)

    sweep(gradients(scan), [f(5, 4, 3), f(3, 6)])
    result, kinds = data_parallel(gradients(scan), [f(6, 4, 3), f(3, 6)])
    assert_sharded(result, kinds, gathered=[6 * 4 * 3 * 4])


def test_concatenated_lists():
    def concatenated(x):
        array = tf.TensorArray(tf.float32, 2, element_shape=(3, 4)).split(x, [3, 3])
        return array.read(1), tf.reduce_sum(array.concat())

    sweep(concatenated, [f(6, 4)])


@pytest.mark.slow
def test_grouped_convolution_is_compiled_per_shard():
    import keras

    layer = keras.layers.Conv2D(4, 3, groups=2, use_bias=False)
    layer.build((None, 5, 5, 2))

    def conv(x, kernel):
        return tf.reduce_sum(layer.stateless_call([kernel], [], x)[0] ** 2)

    args = [f(6, 5, 5, 2), layer.kernel.numpy()]
    result, kinds = data_parallel(gradients(conv), args)
    assert_sharded(result, kinds, gathered=[6 * 5 * 5 * 2 * 4])
    sweep(gradients(conv), [f(5, 5, 5, 2), args[1]], trials=2)
