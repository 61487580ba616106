"""Softmax and cross entropies against the plain ops, classes split included."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import check, devices, sweep, trace, was_split
from tfpar.compile.local import ProgramSet, build_local_program
from tfpar.propagation import Anchors, prepare, propagate
from tfpar.spec import Mesh, Replicate, Shard
from tfpar.tf.interop import convert_func_graph
from tfpar.tf.runtime import InProcessProgram

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


@pytest.mark.slow
@pytest.mark.parametrize("function", [tf.nn.softmax, tf.nn.log_softmax])
def test_softmax_and_gradient(function):
    def both(x, w):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            loss = tf.reduce_sum(y * w)
        return y, tape.gradient(loss, x)

    runs = sweep(both, [30 * f(3, 4, 7), f(3, 4, 7)], trials=4)
    op_type = {"softmax_v2": "Softmax", "log_softmax_v2": "LogSoftmax"}[function.__name__]
    assert all(was_split(runs, op_type, k) for k in ("c", "_0", "_1"))


def test_softmax_over_classes_moves_no_logits():
    mesh = Mesh.of([4])
    run = check(tf.nn.softmax, [f(3, 10)], [(Shard(1),)], mesh)
    found = sorted((kind, size) for kind, _, size in run.partitioned.collectives())
    gathered_result = ("all_gather", 3 * 12 * 4)  # for the caller; 10 classes are stored as 12
    assert found == [gathered_result, ("all_reduce", 12), ("all_reduce", 12)]


def test_softmax_of_masked_rows_and_halves():
    x = f(4, 6)
    x[0, :3] = -np.inf
    x[1, 3:] = -1e9
    sweep(tf.nn.softmax, [x], trials=3, partial=False)
    sweep(tf.nn.softmax, [f(4, 6).astype("float16")], trials=3, atol=2e-3, partial=False)
    sweep(tf.nn.softmax, [f(4, 6).astype("float64")], trials=3, atol=1e-12)


def with_gradient(function):
    def both(logits, labels):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = function(labels, logits)
            total = tf.reduce_sum(loss * tf.range(1, loss.shape[0] + 1, dtype=loss.dtype))
        return loss, tape.gradient(total, logits)

    return both


@pytest.mark.slow
def test_cross_entropy_and_gradient():
    labels = tf.nn.softmax(f(5, 7)).numpy()
    labels[0] = np.eye(7)[3]
    runs = sweep(
        with_gradient(tf.nn.softmax_cross_entropy_with_logits),
        [9 * f(5, 7), labels],
        trials=8,
        rtol=1e-5,
        atol=1e-5,
    )
    op_type = "SoftmaxCrossEntropyWithLogits"
    assert was_split(runs, op_type, "b") and was_split(runs, op_type, "c")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_sparse_cross_entropy_and_gradient(dtype):
    labels = np.array([0, 6, 3, 5, 2], dtype)
    runs = sweep(
        with_gradient(tf.nn.sparse_softmax_cross_entropy_with_logits),
        [9 * f(5, 7), labels],
        trials=8,
        rtol=1e-5,
        atol=1e-5,
    )
    op_type = "SparseSoftmaxCrossEntropyWithLogits"
    assert was_split(runs, op_type, "b") and was_split(runs, op_type, "c")


def test_sparse_cross_entropy_gathers_no_logits():
    function = tf.nn.sparse_softmax_cross_entropy_with_logits
    run = check(
        lambda x, y: function(y, x),
        [f(6, 50), np.arange(6)],
        [(Shard(1),), (Replicate(),)],
        Mesh.of([4]),
    )
    ((kind, _, size),) = run.partitioned.collectives()
    assert kind == "all_gather" and size == 4 * 6 * 3 * 4  # of each block three numbers a row


def test_a_block_of_classes_may_be_impossible():
    """Minus infinity where a vocabulary is masked: all of a rank's classes, or a label's."""
    logits = f(4, 6)
    logits[0, :3] = logits[1, 3:] = logits[2, 0] = -np.inf
    both = with_gradient(tf.nn.sparse_softmax_cross_entropy_with_logits)
    inputs = [logits, np.array([4, 0, 0, 2])]
    check(both, inputs, [(Shard(1),), (Replicate(),)], Mesh.of([2]), rtol=1e-5, atol=1e-6)


def test_label_that_is_no_class_makes_its_row_nan():
    """As on a GPU; the CPU kernel raises."""
    logits, labels = f(3, 5), np.array([1, -1, 5])
    both = with_gradient(tf.nn.sparse_softmax_cross_entropy_with_logits)
    graph = convert_func_graph(trace(both, [logits, labels]).graph)
    mesh = Mesh.of([2])
    whole = (Replicate(),)
    anchors = Anchors(inputs=[whole] * 2, tensors={"arg0:0": (Shard(1),)}, outputs=[whole] * 2)
    local = build_local_program(propagate(prepare(graph), mesh, anchors))
    outputs = InProcessProgram(ProgramSet.of(local), devices(mesh))(
        [tf.constant(logits), tf.constant(labels)], []
    )
    for out in outputs:
        assert np.isfinite(out[0]).all() and np.isnan(out[1:]).all()
