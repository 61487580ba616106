"""Layers that users write themselves, with ops that few layers of Keras have, on a mesh."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.one_epoch import assert_trains_as_on_one_device, cases


def compiled(model, loss="mse", optimizer=None, **arguments):
    optimizer = optimizer or keras.optimizers.SGD(0.02, momentum=0.9)
    model.compile(optimizer, loss, jit_compile=False, **arguments)
    return model


def chain(shape, *network, **arguments):
    return compiled(keras.Sequential([keras.Input(shape), *network]), **arguments)


# --- attention, experts, codes, graphs -------------------------------------------------


class RelativeAttention(layers.Layer):
    """Causal attention whose scores have a learned bias for each distance."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def build(self, shape):
        _, length, width = shape
        size = width // self.heads
        self.query = layers.EinsumDense("btd,dhk->bthk", (None, self.heads, size))
        self.query.build(shape)
        self.key_value = layers.Dense(2 * width)
        self.key_value.build(shape)
        self.out = layers.EinsumDense("bthk,hkd->btd", (None, width))
        self.out.build((None, length, self.heads, size))
        self.bias = self.add_weight(shape=(self.heads, 2 * length - 1), name="bias")

    def call(self, x):
        _, length, width = x.shape
        size = width // self.heads
        key, value = (
            ops.reshape(half, (-1, length, self.heads, size))
            for half in ops.split(self.key_value(x), 2, axis=-1)
        )
        distance = ops.arange(length)[:, None] - ops.arange(length)[None] + length - 1
        scores = ops.einsum("bqhk,bshk->bhqs", self.query(x), key) / np.sqrt(size)
        scores = scores + ops.take(self.bias, distance, axis=1)
        scores = ops.where(ops.tril(ops.ones((length, length))) > 0, scores, -1e9)
        return x + self.out(ops.einsum("bhqs,bshk->bqhk", ops.softmax(scores), value))


def transformer_xl_bias():
    ids = keras.Input((6,), dtype="int32")
    x = RelativeAttention(2)(layers.Embedding(30, 8)(ids))
    x = RelativeAttention(4)(layers.LayerNormalization()(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    among_three = keras.metrics.SparseTopKCategoricalAccuracy(3)
    return compiled(
        keras.Model(ids, layers.Dense(30)(x)),
        loss,
        keras.optimizers.AdamW(1e-3, global_clipnorm=1.0),
        metrics=["sparse_categorical_accuracy", among_three],
    )


class SwitchExperts(layers.Layer):
    """Each token goes to one expert, as far as that one has room, by einsums over one-hots."""

    CAPACITY = 3

    def __init__(self, experts, hidden):
        super().__init__()
        self.experts = experts
        self.hidden = hidden

    def build(self, shape):
        width = shape[-1]
        self.router = self.add_weight(shape=(width, self.experts), name="router")
        self.wide = self.add_weight(shape=(self.experts, width, self.hidden), name="wide")
        self.narrow = self.add_weight(shape=(self.experts, self.hidden, width), name="narrow")

    def call(self, x):
        shares = ops.softmax(x @ self.router)
        chosen = ops.one_hot(ops.argmax(shares, axis=-1), self.experts)
        place = ops.cumsum(chosen, axis=1) * chosen
        chosen = chosen * ops.cast(place <= self.CAPACITY, "float32")
        places = ops.one_hot(ops.cast(place - 1, "int32"), self.CAPACITY)
        dispatch = chosen[..., None] * places
        hidden = ops.einsum("btec,btd->ebcd", dispatch, x)
        hidden = ops.relu(ops.einsum("ebcd,edh->ebch", hidden, self.wide))
        hidden = ops.einsum("ebch,ehd->ebcd", hidden, self.narrow)
        balance = ops.mean(chosen, axis=(0, 1)) * ops.mean(shares, axis=(0, 1))
        self.add_loss(0.01 * self.experts * ops.sum(balance))
        combine = dispatch * ops.max(shares, axis=-1)[..., None, None]
        return x + ops.einsum("btec,ebcd->btd", combine, hidden)


def switch_moe():
    return chain(
        (6, 8), SwitchExperts(4, 12), layers.Dense(3), optimizer=keras.optimizers.Adam(1e-3)
    )


class NearestCodes(layers.Layer):
    """The nearest of ten learned codes for each pixel, with gradients as if nothing happened."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(shape[-1], 10), initializer="uniform", name="codes")

    def call(self, x):
        flat = ops.reshape(x, (-1, x.shape[-1]))
        lengths = ops.sum(flat**2, axis=1, keepdims=True) + ops.sum(self.codes**2, axis=0)
        nearest = ops.one_hot(ops.argmin(lengths - 2 * flat @ self.codes, axis=1), 10)
        coded = ops.reshape(nearest @ ops.transpose(self.codes), ops.shape(x))
        commitment = ops.mean((ops.stop_gradient(coded) - x) ** 2)
        self.add_loss(0.25 * commitment + ops.mean((coded - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(coded - x)


def vq_vae():
    return chain(
        (8, 8, 1),
        layers.Conv2D(4, 3, 2, padding="same"),
        NearestCodes(),
        layers.Conv2DTranspose(1, 3, 2, padding="same"),
        optimizer=keras.optimizers.Adam(1e-3),
    )


class GraphConvolution(layers.Layer):
    """Sends what is at one end of each edge to the other end and adds it up there."""

    def __init__(self, width):
        super().__init__()
        self.dense = layers.Dense(width)

    def build(self, shapes):
        self.dense.build(shapes[0])

    def call(self, graph):
        nodes, edges = graph
        nodes = self.dense(nodes)
        sent = ops.take_along_axis(nodes, edges[..., :1], axis=1)
        to = ops.one_hot(edges[..., 1], ops.shape(nodes)[1])
        return ops.relu(nodes + ops.einsum("bef,ben->bnf", sent, to))


def gnn_segments():
    nodes, edges = keras.Input((6, 4)), keras.Input((9, 2), dtype="int32")
    x = GraphConvolution(8)([nodes, edges])
    x = layers.GlobalAveragePooling1D()(GraphConvolution(8)([x, edges]))
    return compiled(keras.Model([nodes, edges], layers.Dense(2)(x)))


class Transitions(layers.Layer):
    """Holds the scores of one class following another, which only the loss uses."""

    def build(self, shape):
        self.scores = self.add_weight(shape=(shape[-1], shape[-1]), name="scores")

    def call(self, x):
        return x + 0 * ops.sum(self.scores)


def crf_loss():
    """A loss that scans over time with weights of a layer."""
    inputs = keras.Input((6, 4))
    transitions = Transitions()
    model = keras.Model(inputs, transitions(layers.Dense(3)(inputs)))

    def loss(labels, scores):
        between = transitions.scores
        labels = ops.cast(labels, "int32")
        moves = ops.take(ops.reshape(between, (-1,)), 3 * labels[:, :-1] + labels[:, 1:])
        path = ops.sum(ops.one_hot(labels, 3) * scores, axis=(1, 2)) + ops.sum(moves, axis=1)

        def advance(total, now):
            total = ops.logsumexp(total[:, :, None] + between[None], axis=1) + now
            return total, total

        later = ops.transpose(scores[:, 1:], (1, 0, 2))
        total, _ = ops.scan(advance, scores[:, 0], later)
        return ops.logsumexp(total, axis=1) - path

    return compiled(model, loss)


# --- loops and less common ops ---------------------------------------------------------


class Loops(layers.Layer):
    """Every way to loop: over a number, over features, and over samples."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        def add(total, column):
            return total + column, total * column

        hidden = ops.fori_loop(0, 3, lambda _, state: ops.tanh(state @ self.kernel), x)
        total, _ = ops.scan(add, ops.zeros_like(x[:, 0]), ops.transpose(hidden))
        hidden = hidden + tf.map_fn(lambda sample: sample * tf.reduce_sum(sample), x)
        hidden = hidden + ops.vectorized_map(ops.cumsum, x)
        return hidden + total[:, None]


def loops_in_layers():
    return chain((4,), Loops(), layers.Dense(2), optimizer=keras.optimizers.SGD(0.01))


class ManyOps(layers.Layer):
    """Linear algebra, orders, statistics, a Fourier transform and segments, side by side."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4), name="kernel")

    def call(self, x):
        orthogonal, _ = ops.qr(self.kernel)
        solved = x @ orthogonal + x @ ops.inv(self.kernel + 4 * ops.eye(4))
        largest, _ = ops.top_k(x, 2)
        transformed = ops.rfft((x, ops.zeros_like(x)), fft_length=4)
        segments = ops.segment_sum(ops.transpose(x), ops.array([0, 1, 1, 0]), num_segments=2)
        return sum(
            [
                solved,
                ops.sort(x, axis=1) + ops.flip(x, axis=1) + ops.roll(x, 1, axis=1),
                ops.take_along_axis(x, ops.argsort(x, axis=1), axis=1),
                ops.where(x > 0, ops.logaddexp(x, solved), ops.sign(x) * ops.sqrt(ops.abs(x) + 1)),
                ops.cumprod(ops.tanh(x), axis=1),
                ops.norm(x, axis=1, keepdims=True) + ops.logsumexp(x, axis=1, keepdims=True),
                ops.var(x, axis=1, keepdims=True) + ops.median(x, axis=1, keepdims=True),
                ops.quantile(x, 0.3, axis=1, keepdims=True),
                ops.repeat(largest, 2, axis=1) + ops.tile(largest, (1, 2)),
                ops.irfft(transformed, fft_length=4),
                ops.pad(ops.transpose(segments), ((0, 0), (1, 1))),
                ops.outer(ops.mean(x, axis=0), ops.ones(4))[0],
            ]
        )


def ops_zoo():
    return chain((4,), ManyOps(), layers.Dense(2), optimizer=keras.optimizers.SGD(0.001))


class Candidates(layers.Layer):
    """What a beam search does: the best scores, their ranks, and what lies where they are."""

    def call(self, x):
        best, where = ops.top_k(x, 3)
        ranks = ops.cast(ops.argsort(ops.argsort(x, axis=1), axis=1), "float32")
        interval = ops.searchsorted(ops.array([-1.0, 0.0, 1.0]), x[:, 0])
        found = [
            best,
            ops.take_along_axis(x, where, axis=1),
            ops.one_hot(ops.argmax(x, axis=1), x.shape[1]) * x,
            ops.stop_gradient(ranks) * x,
            ops.cast(interval, "float32")[:, None],
        ]
        return ops.concatenate(found, axis=1)


def argmax_sort_gather_beam():
    return chain((5,), layers.Dense(6), Candidates(), layers.Dense(2))


class LogSpectrogram(layers.Layer):
    """Short Fourier transforms that overlap, one after the other in time."""

    def call(self, waves):
        real, imaginary = ops.stft(waves, 16, 8, 16)
        return ops.log(ops.sqrt(real**2 + imaginary**2 + 1e-6))


def stft_audio():
    return chain(
        (64,),
        layers.Dense(64),
        LogSpectrogram(),
        layers.Conv1D(4, 3),
        layers.GlobalAveragePooling1D(),
        layers.Dense(2),
    )


# --- all of them -----------------------------------------------------------------------


def image_twice(samples):
    images = samples.real(8, 8, 1)
    return images, images


MODELS = {
    "transformer_xl_bias": (
        transformer_xl_bias,
        lambda samples: (samples.labels(30, 6), samples.labels(30, 6)),
    ),
    "switch_moe": (switch_moe, lambda samples: (samples.real(6, 8), samples.real(6, 3))),
    "vq_vae": (vq_vae, image_twice),
    "gnn_segments": (
        gnn_segments,
        lambda samples: ([samples.real(6, 4), samples.labels(6, 9, 2)], samples.real(2)),
    ),
    "crf_loss": (crf_loss, lambda samples: (samples.real(6, 4), samples.labels(3, 6))),
    "loops_in_layers": (loops_in_layers, lambda samples: (samples.real(4), samples.real(2))),
    "ops_zoo": (ops_zoo, lambda samples: (samples.real(4), samples.real(2))),
    "argmax_sort_gather_beam": (
        argmax_sort_gather_beam,
        lambda samples: (samples.real(5), samples.real(2)),
    ),
    "stft_audio": (stft_audio, lambda samples: (samples.real(64), samples.real(2))),
}
BY_DEFAULT = ("transformer_xl_bias", "loops_in_layers", "ops_zoo")
IN_BOTH_WAYS = ("gnn_segments",)


@pytest.mark.parametrize(("name", "mode"), cases(MODELS, BY_DEFAULT, IN_BOTH_WAYS))
def test_trains_as_on_one_device(name, mode):
    assert_trains_as_on_one_device(*MODELS[name], mode)
