"""Ops that move, join, cut and repeat elements, against the plain ops."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import check, sweep, trace, was_split
from tfpar.propagation import prepare
from tfpar.rules.layout import common_factors
from tfpar.spec import Mesh, Partial, Replicate, Shard, replicated_spec
from tfpar.tf.interop import convert_func_graph

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def with_gradient(function):
    """`function` of one tensor and its gradient under an asymmetric loss."""

    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outs = tf.nest.flatten(function(x))
            loss = tf.add_n([tf.reduce_sum(tf.sin(o) * o) for o in outs])
        return [*outs, tape.gradient(loss, x)]

    return both


def test_shape_arithmetic_stays_global():
    def function(x):
        shape = tf.shape(x)
        n = tf.raw_ops.ShapeN(input=[x, x])[1]
        flat = tf.reshape(x, tf.stack([shape[0] * shape[1], -1]))
        return (
            shape,
            n,
            tf.size(x),
            tf.cast(tf.shape(flat)[0], tf.float32) * x,
            tf.zeros(shape) + x,
            tf.range(shape[0]),
            tf.broadcast_to(x[:1], shape) + x,
        )

    x = f(5, 4, 3)
    sweep(function, [x], trials=4)
    graph = convert_func_graph(trace(function, [x]).graph)
    prepare(graph)
    assert not {"Shape", "ShapeN", "Size", "Pack"} & {op.type for op in graph.ops}


def test_shape_of_a_sharded_tensor_costs_nothing():
    result = check(lambda x: tf.shape(x), [f(6, 4)], [(Shard(0),)], Mesh.of([2]))
    assert result.partitioned.collectives() == []


def test_common_factors_of_empty_shapes():
    assert common_factors((0, 4), (4, 0)) == ([[], []], [[], []], [])
    sweep(lambda x: tf.reshape(x[:0], [0, 2, 2]), [f(4, 4)], trials=2)


@pytest.mark.slow
@pytest.mark.parametrize("multiples", [(1, 2, 1), (3, 1, 2), (2, 2, 2)])
def test_tile(multiples):
    runs = sweep(with_gradient(lambda x: tf.tile(x, multiples)), [f(5, 4, 1)], trials=4)
    assert all(was_split(runs, "Tile", k) for k in ("d0", "d1"))


def test_broadcast_and_fill():
    runs = sweep(
        with_gradient(
            lambda x: (
                tf.broadcast_to(x, [2, 5, 4]),
                tf.fill([5, 4], 3.0) + x,
                tf.reduce_mean(x, 0),
            )
        ),
        [f(5, 4)],
        trials=4,
    )
    assert was_split(runs, "BroadcastTo", "_0") and was_split(runs, "BroadcastTo", "_1")


def test_ensure_shape():
    runs = sweep(with_gradient(lambda x: tf.ensure_shape(x, [5, 4])), [f(5, 4)], trials=3)
    assert was_split(runs, "EnsureShape", "_0")


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat(axis):
    parts = [f(4, 6, 5), f(4, 6, 5), f(4, 6, 5)]

    def function(a, b, c):
        with tf.GradientTape() as tape:
            tape.watch([a, b, c])
            out = tf.concat([a, b, c], axis)
            loss = tf.reduce_sum(tf.sin(out) * out)
        return [out, *tape.gradient(loss, [a, b, c])]

    runs = sweep(function, parts, trials=4)
    assert all(was_split(runs, "ConcatV2", f"d{d}") for d in range(3))
    assert all(was_split(runs, "Slice", f"d{d}") for d in range(3))


def test_concat_of_pieces_with_a_common_length():
    runs = sweep(lambda a, b: tf.concat([a, b], 1), [f(3, 12), f(3, 4)], trials=4)
    assert was_split(runs, "ConcatV2", "d1")
    sweep(lambda a, b: tf.concat([a, b, a], 0), [f(3, 4), f(2, 4)], trials=3)


def test_fused_halves_split_inside_each_half():
    """A gate and a value in one projection: a strided shard passes without a collective."""
    halves = (Shard(1, 6),)
    for mesh in (Mesh.of([2]), Mesh.of([3])):
        result = check(lambda x: tf.multiply(*tf.split(x, 2, 1)), [f(4, 12)], [halves], mesh)
        assert [d.strategy.out_specs for d in result.decisions("Split")] == [((Shard(1),),) * 2]
        assert len(result.partitioned.collectives()) == 1  # the test's own gather of the result


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [3, [2, 4, 6], [2, 6, -1], [5, 7]])
def test_split(sizes):
    runs = sweep(with_gradient(lambda x: tf.split(x, sizes, 1)), [f(5, 12)], trials=4)
    kind = "Split" if sizes == 3 else "SplitV"
    assert was_split(runs, kind, "d0")


def test_split_v_with_strided_shard():
    for mesh in (Mesh.of([2]), Mesh.of([3])):
        result = check(lambda x: tf.split(x, [2, 4, 6], 1), [f(3, 12)], [(Shard(1, 2),)], mesh)
        assert was_split([result], "SplitV", "d1")


def test_pack_and_unpack():
    runs = sweep(
        with_gradient(lambda x: tf.stack([tf.sin(t) for t in tf.unstack(x, axis=1)], axis=2)),
        [f(5, 3, 4)],
        trials=5,
    )
    for op_type in ("Pack", "Unpack"):
        assert was_split(runs, op_type, "d0")
    assert was_split(runs, "Unpack", "d2")


def test_space_to_batch():
    def function(x):
        y = tf.space_to_batch(x, [2, 2], [[0, 0], [1, 1]])
        return tf.batch_to_space(tf.sin(y), [2, 2], [[0, 0], [1, 1]])

    runs = sweep(with_gradient(function), [f(5, 4, 4, 3)], trials=4)
    for op_type in ("SpaceToBatchND", "BatchToSpaceND"):
        assert was_split(runs, op_type, "b") and was_split(runs, op_type, "r0")


def test_partials_pass_through_relabelling():
    x = f(4, 6)
    for op_type, function in {
        "Tile": lambda a: tf.tile(a, [2, 1]),
        "Split": lambda a: tf.split(a, 2, 1),
        "Slice": lambda a: tf.slice(a, [1, 0], [2, 6]),
        "StridedSlice": lambda a: a[::2, 1:],
        "Roll": lambda a: tf.roll(a, 1, 0),
    }.items():
        result = check(function, [x], [(Partial("sum"),)], Mesh.of([2]))
        assert all(
            d.strategy.in_specs[int(op_type == "Split")] == (Partial("sum"),)
            for d in result.decisions(op_type)
        )
    check(lambda a: tf.tile(a, [2, 1]), [x], [(Partial("max"), Replicate())], Mesh.of([2, 2]))


def test_bitcast_to_another_width():
    def function(x):
        return tf.bitcast(tf.bitcast(x, tf.int8), tf.int32), tf.bitcast(x, tf.int32)

    runs = sweep(function, [f(5, 4)], trials=2, partial=False)
    assert was_split(runs, "Bitcast", "_0") and was_split(runs, "Bitcast", "_1")


@pytest.mark.parametrize("mesh", [Mesh.of([2]), Mesh.of([2, 2])])
def test_blocks_of_rows_survive_flattening(mesh):
    """Samples that do not divide, cut into windows, flattened and restored."""

    def function(x):
        windows = tf.reshape(x, [20, 6])
        flat = tf.reshape(windows * 2.0, [120])
        return tf.reshape(tf.sin(flat), [20, 3, 2]), tf.reshape(tf.cos(flat), [5, 24])

    spec = (Shard(0),) * len(mesh.shape)
    result = check(function, [f(5, 4, 6)], [spec], mesh)
    kinds = {kind for kind, _, _ in result.partitioned.collectives()}
    assert kinds == {"all_gather"}
    whole = replicated_spec(len(mesh.shape))
    gathered = {r.tensor for r in result.partitioned.reshards if r.target == whole}
    assert gathered == set(result.partitioned.graph.outputs), "only the results are gathered"


def test_blocks_of_rows_with_their_gradient():
    runs = sweep(
        with_gradient(lambda x: tf.sin(tf.reshape(tf.reshape(x, [15, 4]), [60]))),
        [f(5, 3, 4)],
        trials=4,
    )
    assert was_split(runs, "Reshape", "f0")


@pytest.mark.slow
def test_ops_of_older_graphs():
    """Op types that TensorFlow's Python no longer makes, but saved graphs have."""
    raw = tf.raw_ops

    def function(x):
        z = tf.complex(x, 2 * x)
        return (
            raw.Concat(concat_dim=1, values=[x, x]),
            raw.Reverse(tensor=x, dims=[False, True, False]),
            raw.Gather(params=x, indices=[1, 3]),
            raw.PlaceholderWithDefault(input=x, shape=[5, 4, 3]),
            raw.Empty(shape=[5, 4, 3], dtype=tf.float32, init=True) + x,
            tf.math.imag(raw.ConjugateTranspose(x=z, perm=[1, 0, 2])),
            tf.squeeze(tf.expand_dims(x, 1), 1),
            raw.InvertPermutation(x=tf.argsort(x[:, 0, 0])),
            raw.LinSpace(start=x[0, 0, 0], stop=2.0, num=5),
            tf.range(x[0, 0, 0], x[0, 0, 0] + 5.0)[:4],
        )

    runs = sweep(function, [f(5, 4, 3)], trials=4)
    for op_type in ("Concat", "Reverse", "PlaceholderWithDefault", "ConjugateTranspose"):
        assert any(was_split(runs, op_type, k) for k in ("d0", "_2")), op_type
    assert was_split(runs, "ExpandDims", "f0") and was_split(runs, "Squeeze", "f0")


def test_a_pattern_that_an_axis_before_leaves_no_room_for():
    specs = [(Replicate(), Shard(0, None, 2)), (Shard(0), Replicate())]
    check(lambda a, b: a + b, [f(6, 2), f(6, 2)], specs, Mesh.of([2, 2]))
