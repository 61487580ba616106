"""ATP (§3.2, Fig. 6) from two-dimensional specs: what propagation makes of a transformer layer.

Only the weights are laid. That the residual stream is split along d2, that the attention core is
shared by all ranks, and which collectives that takes, has to follow.
"""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
import tensorflow as tf

from tfpar.compile import prepare_step
from tfpar.propagation import Anchors, PartitionedGraph, propagate
from tfpar.spec import Mesh, Partial, Replicate, Shard, format_spec, local_shape, parse_spec
from tfpar.tf.capture import argument_specs, capture_step

B, S, H, HEADS = 4, 8, 16, 4
COLUMN_FIRST, ROW_FIRST = "S(1),S(0)", "S(0),S(1)"
MESHES = [Mesh(("d1", "d2"), shape) for shape in ((2, 2), (2, 4), (4, 2))]


def weight(name, *shape):
    return tf.Variable(np.ones(shape, "float32"), name=name)


def partition(function, weights, laid, mesh, batch_axes=(), batch=B) -> PartitionedGraph:
    """Gradients of `function(x)` by `x` and the weights, propagated from `laid` (name -> spec)."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.square(function(x)))
        return tape.gradient(loss, [x, *weights])

    captured = capture_step(step, argument_specs((tf.zeros((batch, S, H)),)))
    prepared = prepare_step(captured)
    data = [Replicate()] * (mesh.num_axes - 2)
    variables = {f"{n}:0": (*data, *parse_spec(spec)) for n, spec in laid.items()}
    names = {v.name for v in prepared.graph.variables}
    assert {n if n in names else n[:-2] for n in variables} <= names
    variables = {n if n in names else n[:-2]: s for n, s in variables.items()}
    fed = tuple(Shard(0) if n in batch_axes else Replicate() for n in mesh.axis_names)
    return propagate(prepared, mesh, Anchors(variables=variables, inputs=[fed]))


def volumes(partitioned, least=0):
    """(axes, kind) -> payloads in floats of one rank, of those above `least`."""
    found = collections.defaultdict(list)
    for kind, axes, size in partitioned.collectives():
        if size // 4 > least:
            found[" ".join(axes), kind].append(size // 4)
    return dict(found)


def equivalents(partitioned, axis, least=0):
    """What is moved along `axis` in floats of all-reduces, of which the others are half."""
    return sum(
        sum(sizes) * (1 if kind == "all_reduce" else 0.5)
        for (axes, kind), sizes in volumes(partitioned, least).items()
        if axes == axis
    )


def mlp():
    a, b = weight("a", H, 4 * H), weight("b", 4 * H, H)

    def function(x):
        return tf.tensordot(tf.nn.relu(tf.tensordot(x, a, 1)), b, 1)

    return function, [a, b], {"a": COLUMN_FIRST, "b": ROW_FIRST}


def attention(length=S):
    """Attention whose core has a softmax, with biases as in Keras."""
    names = ("q", "k", "v")
    kernels = [weight(n, H, H) for n in names]
    biases = [weight(f"{n}_bias", H) for n in names]
    out = weight("o", H, H)

    def function(x):
        x = x[:, :length]
        q, k, v = (
            tf.reshape(tf.tensordot(x, w, 1) + b, (-1, length, HEADS, H // HEADS))
            for w, b in zip(kernels, biases, strict=True)
        )
        scores = tf.nn.softmax(tf.einsum("bqhd,bkhd->bhqk", q * 0.5, k))
        mixed = tf.einsum("bhqk,bkhd->bqhd", scores, v)
        return tf.tensordot(tf.reshape(mixed, (-1, length, H)), out, 1)

    laid = {**dict.fromkeys(names, COLUMN_FIRST), "o": ROW_FIRST}
    return function, [*kernels, *biases, out], laid


def layer():
    """Pre-normalised attention and feed-forward layer, each added to what it read."""
    feed_forward, mlp_weights, mlp_laid = mlp()
    attend, attention_weights, attention_laid = attention()
    scales = [weight("scale_1", H), weight("scale_2", H)]

    def norm(x, scale):
        return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-6) * scale

    def function(x):
        x = x + attend(norm(x, scales[0]))
        return x + feed_forward(norm(x, scales[1]))

    return (
        function,
        [*mlp_weights, *attention_weights, *scales],
        {**mlp_laid, **attention_laid},
    )


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_feed_forward_layer_has_f3_and_f4_and_their_conjugates(mesh):
    d1, d2 = mesh.shape
    found = volumes(partition(*mlp(), mesh))
    wide, narrow = B * S * 4 * H // d1, B * S * H // d2
    # The input of the layer is whole here: its gradient is gathered from nowhere.
    assert found == {("d2", "all_reduce"): [wide, wide], ("d1", "all_reduce"): [narrow, narrow]}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_layer_moves_what_equation_2_says(mesh):
    """Forward 7h/d1 over d2 and 2h/d2 over d1, times b s; backward 5h/d1 and 2h/d2.

    Equation 2 counts 7h/d1 for the backward pass too: but what comes back into the core is one
    gradient of h/d1, where Q, K and V are three.
    """
    d1, d2 = mesh.shape
    partitioned = partition(*layer(), mesh)
    bs, statistics = B * S, B * S
    assert equivalents(partitioned, "d1", statistics) == pytest.approx(bs * (2 + 2) * H / d2)
    assert equivalents(partitioned, "d2", statistics) == pytest.approx(bs * (7 + 5) * H / d1)
    assert set(volumes(partitioned, statistics)) == {
        ("d1", "all_reduce"),
        ("d2", "all_reduce"),
        ("d2", "reduce_scatter"),
        ("d2", "all_gather"),
    }


def test_gradients_of_queries_keys_and_values_are_reduced_as_one():
    found = volumes(partition(*attention(), MESHES[0]), B * S)
    assert found["d1", "all_reduce"] == [B * S * H // 2] * 2


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_has_an_equal_part_of_the_attention_core(mesh):
    partitioned = partition(*attention(), mesh)
    scores = (B, HEADS, S, S)
    products = [
        op
        for op in partitioned.graph.ops
        if op.type in ("BatchMatMulV2", "Einsum") and op.outputs[0].shape == scores
    ]
    assert len(products) == 2  # of Q and K, and the gradient of the weights of V
    for op in products:
        (spec,) = partitioned.decisions[op].strategy.out_specs
        assert not any(isinstance(p, Partial) for p in spec)
        assert math.prod(local_shape(scores, spec, mesh)) * mesh.size == math.prod(scores)


def test_queries_keys_and_values_are_scattered_and_what_comes_of_them_gathered():
    found = volumes(partition(*attention(), MESHES[0]), B * S)
    part = B * S * H // 2
    assert found["d2", "reduce_scatter"] == [part] * 4  # Q, K and V; the core's gradient
    assert found["d2", "all_gather"] == [part] * 4  # the core's result; gradients of Q, K and V
    assert ("d2", "all_reduce") not in found


def test_short_sequences_are_scattered_too():
    """Where gathering the small scores would be cheaper than scattering V, if a sum were free."""
    found = volumes(partition(*attention(length=2), MESHES[0]), B * 2)
    assert found["d2", "reduce_scatter"] == [B * 2 * H // 2] * 4


def test_heads_are_scattered_where_the_batch_does_not_divide():
    found = volumes(partition(*attention(), MESHES[0], batch=3), 3 * S)
    part = 3 * S * H // 2
    assert found == {
        ("d2", "reduce_scatter"): [part] * 4,
        ("d2", "all_gather"): [part] * 4,
        ("d1", "all_reduce"): [part] * 2,
    }


def test_what_does_not_divide_is_reduced_whole():
    """Neither the batch nor the heads that an axis of three would have to share."""
    mesh = Mesh(("d1", "d2"), (2, 3))
    found = volumes(partition(*attention(), mesh), B * S)
    part = B * S * H // 2
    assert found["d2", "all_reduce"] == [part] * 4
    assert not {kind for _, kind in found} - {"all_reduce"}


def test_a_data_axis_splits_the_batch_first():
    mesh = Mesh(("data", "d1", "d2"), (2, 2, 2))
    partitioned = partition(*attention(), mesh, ("data",))
    found = volumes(partitioned, B * S // 2)
    part = B // 2 * S * H // 2
    assert found["d2", "reduce_scatter"] == found["d2", "all_gather"] == [part] * 4
    assert found["d1", "all_reduce"] == [part] * 2


def test_open_scales_follow_the_stream_that_they_scale():
    partitioned = partition(*layer(), MESHES[0])
    specs = {v.name.removesuffix(":0"): s for v, s in partitioned.variable_specs.items()}
    assert format_spec(specs["scale_2"]) == "R,S(0)"
    assert format_spec(specs["q_bias"]) == "S(0),R"


def test_an_open_table_follows_the_matrix_that_comes_next():
    """Through a normalisation, in which nothing is split yet."""
    table, kernel = weight("table", 10, H), weight("kernel", H, 8)
    scale = weight("scale", H)

    def function(x):
        x = tf.gather(table, tf.cast(x[..., 0], "int32"))
        centred = x - tf.reduce_mean(x, -1, keepdims=True)
        x = centred * (tf.math.rsqrt(tf.reduce_mean(tf.square(centred), -1, keepdims=True)) * scale)
        return tf.tensordot(x, kernel, 1)

    for laid, table_spec in ((COLUMN_FIRST, "R,S(1)"), ("R,S(1)", "R,R")):
        partitioned = partition(function, [table, kernel, scale], {"kernel": laid}, MESHES[0])
        specs = {v.name.removesuffix(":0"): s for v, s in partitioned.variable_specs.items()}
        assert format_spec(specs["table"]) == table_spec


def test_a_partial_is_not_carried_into_a_weight_split_along_its_axis():
    """The gradient of the inner activations: reduced before it meets the first kernel, which
    carrying it would gather, however small it is beside the activations."""
    found = volumes(partition(*mlp(), Mesh(("d1", "d2"), (1, 2))))
    assert found == {("d2", "all_reduce"): [B * S * 4 * H] * 2}
