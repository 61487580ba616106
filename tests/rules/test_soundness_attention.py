"""Attention on blocks of its scores against the plain ops, with gradients."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import Traced, check, sweep, was_split
from tfpar.ir import fuse_attention
from tfpar.spec import Mesh, Replicate, Shard

rng = np.random.default_rng(0)
LENGTH = 8


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def fused(graph):
    """Fuse attentions as in a step, from which unread gradients have been trimmed."""
    read, pending = set(), [t.op for t in (*graph.outputs, *graph.inputs)]
    while pending:
        op = pending.pop()
        if op not in read:
            read.add(op)
            pending += op.predecessors
    graph.ops = [op for op in graph.ops if op in read]
    return fuse_attention(graph)


def with_gradients(attention):
    def both(q, k, v, w, *masks):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            y = attention(q, k, v, *masks)
            loss = tf.reduce_sum(y * w)
        return y, *tape.gradient(loss, [q, k, v])

    return both


def causal(q, k, v):
    at = tf.range(q.shape[-2])
    scores = tf.matmul(q, k, transpose_b=True) * 0.5
    return tf.matmul(tf.nn.softmax(tf.where(at[:, None] >= at, scores, -1e9)), v)


def of_heads(q, k, v, rows, columns, both):
    """Masks by row, by column and by both; weights that are masked, too; a cap on scores."""
    scores = 9 * tf.tanh(tf.einsum("bthd,bshd->bhts", q, k) / 9) + both
    seen = (columns[:, None, None] > 0) & (rows[:, None, :, None] > 0)
    weights = tf.nn.softmax(tf.where(seen, scores, -3e38))
    weights = tf.where(seen, weights, 0.0)
    return tf.einsum("bhts,bshd->bthd", weights, v)


def masks(length=LENGTH):
    return np.arange(length)[None] % 3 + np.zeros((2, 1)), np.ones((2, length)), f(length, length)


def positions_split(args, mesh, dim=1):
    """Specs that split what has positions along the last axis of a mesh."""
    whole = (Replicate(),) * (mesh.num_axes - 1)
    return [(*whole, Shard(dim)) for _ in args]


@pytest.mark.slow
def test_causal_attention_and_its_gradient():
    args = [f(2, LENGTH, 4), f(2, LENGTH, 4), f(2, LENGTH, 6), f(2, LENGTH, 6)]
    function = with_gradients(causal)
    runs = sweep(function, args, trials=2, partial=False, change=fused)
    traced = Traced.of(function, args, fused)
    for mesh in Mesh.of([2]), Mesh.of([4]), Mesh.of([2, 2]):
        runs.append(traced.check(positions_split(args, mesh), mesh))
    for spec in (Shard(1), Shard(1)), (Shard(0), Replicate()):
        runs.append(traced.check([spec] * 4, Mesh.of([2, 2])))
    for op_type in ("TfparAttention", "TfparAttentionGradient"):
        assert all(was_split(runs, op_type, factor) for factor in ("b0", "x"))


@pytest.mark.slow
def test_masks_and_heads():
    shape = (2, LENGTH, 3, 4)
    args = [f(*shape), f(*shape), f(*shape), f(*shape), *masks()]
    function = with_gradients(of_heads)
    runs = sweep(function, args, trials=2, partial=False, change=fused)
    traced = Traced.of(function, args, fused)
    for mesh in Mesh.of([2]), Mesh.of([4]):
        specs = [*positions_split(args[:-1], mesh), (Shard(0),)]
        runs.append(traced.check(specs, mesh))
    for dim in (0, 2):
        runs.append(traced.check([(Shard(dim),)] * 4 + [(Replicate(),)] * 3, Mesh.of([2])))
    assert all(was_split(runs, "TfparAttention", factor) for factor in ("b0", "b1", "x"))


@pytest.mark.slow
@pytest.mark.parametrize("columns", [6, 8])
def test_queries_of_their_own_positions(columns):
    def open_(q, k, v):
        return tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), v)

    args = [f(2, 6, 4), f(2, columns, 4), f(2, columns, 4), f(2, 6, 4)]
    runs = sweep(with_gradients(open_), args, trials=2, change=fused)
    traced, mesh = Traced.of(with_gradients(open_), args, fused), Mesh.of([2])
    runs.append(traced.check(positions_split(args, mesh), mesh))
    assert was_split(runs, "TfparAttention", "x" if columns == 6 else "t")


def test_what_stays_whole_and_what_passes():
    """Each rank sends its keys and values once less than there are ranks, and half the scores of a
    causal mask are computed."""
    mesh = Mesh.of([4])
    args = [f(2, LENGTH, 4)] * 3
    traced = Traced.of(causal, args, fused)
    run = traced.check([(Shard(1),)] * 3, mesh)
    (decision,) = run.decisions("TfparAttention")
    products = [op for op in decision.expansion.graph.ops if op.type == "BatchMatMulV2"]
    scores = sum(op.outputs[0].num_elements for op in products if op.outputs[0].shape[-1] == 1)
    assert scores == 2 * LENGTH * (LENGTH + 1) / 2
    passed = [c for c in decision.expansion.communications() if c.kind == "permute" and c.ahead]
    assert len(passed) == 3 * 4, "of two chunks each, of keys and of values"
    assert {c.num_bytes for c in passed} == {2 * 1 * 4 * 4}


def test_rows_that_see_nothing():
    """They weigh all positions alike, as without blocks."""
    args = [f(2, LENGTH, 2, 4)] * 3
    nothing = [np.zeros((2, LENGTH)), np.ones((2, LENGTH)), np.zeros((LENGTH, LENGTH), "float32")]

    def masked(q, k, v, rows, columns, both):
        seen = (columns[:, None, None] > 0) & (rows[:, None, :, None] > 0)
        scores = tf.where(seen, tf.einsum("bthd,bshd->bhts", q, k) + both, -2e38)
        return tf.einsum("bhts,bshd->bthd", tf.nn.softmax(scores), v)

    specs = [(Shard(1),)] * 3 + [(Replicate(),)] * 3
    run = Traced.of(masked, [*args, *nothing], fused).check(specs, Mesh.of([2]))
    np.testing.assert_allclose(run.outputs[0][:, 0], args[0].mean(1), rtol=1e-4, atol=1e-5)


def test_a_bias_that_is_learned_for_each_score_is_left_alone():
    def biased(q, k, v, bias):
        with tf.GradientTape() as tape:
            tape.watch(bias)
            scores = tf.matmul(q, k, transpose_b=True) + bias
            loss = tf.reduce_sum(tf.matmul(tf.nn.softmax(scores), v) ** 2)
        return tape.gradient(loss, bias)

    args = [f(2, LENGTH, 4)] * 3 + [f(LENGTH, LENGTH)]
    traced = Traced.of(biased, args, fused)
    assert not {op.type for op in traced.prepared.graph.ops} & {"TfparAttention"}
    check(biased, args, [(Shard(1),)] * 3 + [(Replicate(),)], Mesh.of([2]))


@pytest.mark.parametrize("operands", ["shared", "of two dims of features", "reshaped"])
def test_operands_of_other_shapes(operands):
    """Keys that all samples share, values of two dims of features, and a batch of one sample."""
    samples = 1 if operands == "reshaped" else 2

    def attention(q, k, v):
        if operands == "shared":
            scores = tf.matmul(q, k[:1], transpose_b=True)
        else:
            scores = tf.matmul(q, k, transpose_b=True)
        weights = tf.nn.softmax(scores)
        if operands == "reshaped":
            weights = weights[0]
            return tf.matmul(weights, v[0])[None]
        if operands == "shared":
            return tf.matmul(weights, v)
        made = tf.einsum("bts,bsde->btde", weights, tf.reshape(v, (2, LENGTH, 2, 2)))
        return tf.reshape(made, (2, LENGTH, 4))

    args = [f(samples, LENGTH, 4)] * 4
    traced = Traced.of(with_gradients(attention), args, fused)
    for mesh in Mesh.of([1]), Mesh.of([2]):
        traced.check(positions_split(args, mesh), mesh)


@pytest.mark.parametrize("mask", ["turned round", "of thirds", "by two"])
def test_masks_by_other_positions(mask):
    """What is no plain count of positions is left to TensorFlow."""

    def attention(q, k, v):
        at = tf.range(LENGTH)
        if mask == "turned round":
            seen = at[:, None] >= at[::-1]
        elif mask == "of thirds":
            seen = tf.range(0.0, LENGTH / 3 - 0.1, 1 / 3)[:, None] >= tf.range(LENGTH + 0.0)
        else:
            seen = at[:, None] >= tf.range(0, 2 * LENGTH, 2)
        scores = tf.where(seen, tf.matmul(q, k, transpose_b=True), -1e9)
        return tf.matmul(tf.nn.softmax(scores), v)

    args = [f(2, LENGTH, 4)] * 3
    traced = Traced.of(attention, args, fused)
    for mesh in Mesh.of([1]), Mesh.of([2]):
        traced.check([(Shard(1),)] * 3, mesh)


def test_weights_with_a_gradient_of_their_own_are_left_alone():
    """Of weights that hand on another gradient than theirs, less is known than blocks need."""

    @tf.custom_gradient
    def doubled(weights):
        return weights, lambda gradient: 2 * gradient

    def attention(q, k, v):
        return tf.matmul(doubled(tf.nn.softmax(tf.matmul(q, k, transpose_b=True))), v)

    args = [f(2, LENGTH, 4)] * 4
    traced = Traced.of(with_gradients(attention), args, fused)
    assert not {op.type for op in traced.prepared.graph.ops} & {"TfparAttention"}
