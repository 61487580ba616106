"""Gradients of lookups and selections within samples, which stay within samples."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import check, sweep, trace, was_split
from tfpar.ir import BLOCK_SUM
from tfpar.propagation import prepare
from tfpar.spec import Mesh, Replicate, Shard
from tfpar.tf.interop import convert_func_graph

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def gradient(function):
    def run(x, *others):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.sin(function(x, *others)))
        return tape.gradient(loss, x)

    return run


def lookup(batch_dims):
    return gradient(lambda x, i: tf.gather(x, i, batch_dims=batch_dims))


def top_k(x):
    return tf.math.top_k(x, k=2).values


LOOKUPS = {
    "positions": (lookup(1), [f(5, 7, 3), rng.integers(0, 7, (5, 4)).astype("int32")]),
    "two batch dims": (lookup(2), [f(5, 3, 6), rng.integers(0, 6, (5, 3, 4)).astype("int32")]),
    "flattened": (
        gradient(lambda x, i: tf.gather(tf.reshape(x, [15, 6]), i, batch_dims=1)),
        [f(5, 3, 6), rng.integers(0, 6, (15, 4)).astype("int64")],
    ),
    "top k": (gradient(top_k), [rng.permutation(60).reshape(5, 3, 4).astype("float32")]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKUPS)
def test_sums_stay_within_samples(name):
    function, args = LOOKUPS[name]
    runs = sweep(function, args, trials=4)
    assert was_split(runs, BLOCK_SUM, "b")
    if len(args) > 1:
        assert was_split(runs, BLOCK_SUM, "k")
    for mesh, spec in (Mesh.of([2]), (Shard(0),)), (Mesh.of([2, 2]), (Shard(0), Shard(0))):
        result = check(function, args, [spec] * len(args), mesh)
        kinds = [kind for kind, _, _ in result.partitioned.collectives()]
        assert set(kinds) == {"all_gather"}, "only the result is gathered"


@pytest.mark.parametrize(
    "function",
    [
        # Ids that nobody vouches for may reach into the next sample.
        lambda x, i: tf.math.unsorted_segment_sum(x, i + tf.range(0, 30, 6, dtype=i.dtype), 30),
        # The offsets are not those of the samples.
        lambda x, i: (
            tf.gather(tf.reshape(x[:4], [2, 2]), i[:2, None], batch_dims=1),
            tf.math.unsorted_segment_sum(x, i + tf.range(0, 15, 3, dtype=i.dtype), 30),
        ),
    ],
)
def test_other_sums_are_left_alone(function):
    args = [f(5), rng.integers(0, 2, 5).astype("int32")]
    graph = convert_func_graph(trace(function, args).graph)
    prepare(graph)
    assert BLOCK_SUM not in {op.type for op in graph.ops}
    check(function, args, [(Shard(0),), (Replicate(),)], Mesh.of([2]))
