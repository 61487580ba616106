"""Small models drawn at random, of layers and ops that planners find hard: sizes that nothing
divides, pieces of concatenations, dims merged and taken apart, lookups, sorting, loops, branches.

What a model computes makes no sense; what matters is that its step runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.planning.problems import Captured

Tensor = keras.KerasTensor
Block = Callable[[np.random.Generator, Tensor], Tensor]

BATCHES = (4, 6, 8, 12)

ODD = (1, 2, 3, 5, 6, 7, 11, 12, 16)
"""Sizes to draw from."""


class Apply(keras.layers.Layer):
    """A function of the input, whose last dim goes through a matrix before."""

    def __init__(self, function, units: int | None = None) -> None:
        super().__init__()
        self.function, self.units = function, units

    def build(self, shape) -> None:
        units = shape[-1] if self.units is None else self.units
        self.kernel = self.add_weight(shape=(shape[-1], units), name="kernel")

    def call(self, x):
        return self.function(ops.matmul(x, self.kernel))


def _size(rng: np.random.Generator) -> int:
    return int(rng.choice(ODD))


# --- of anything ----------------------------------------------------------------------------


def dense(rng, x):
    activation = rng.choice(["relu", "gelu", "softmax", "tanh"])
    return layers.Dense(_size(rng), str(activation), use_bias=bool(rng.random() < 0.7))(x)


def residual(rng, x):
    hidden = layers.Dense(_size(rng), "relu")(x)
    return layers.add([x, layers.Dense(x.shape[-1])(hidden)])


def shared(rng, x):
    """One layer, used twice."""
    layer = layers.Dense(x.shape[-1], "tanh")
    return layer(layer(x))


def pieces(rng, x):
    """A concatenation of several branches of one size, or of different ones."""
    size, count = _size(rng), int(rng.integers(2, 7))
    sizes = [size] * count if rng.random() < 0.7 else [_size(rng) for _ in range(count)]
    return layers.concatenate([layers.Dense(n)(x) for n in sizes])


def gated(rng, x):
    """The halves of one product."""
    size = _size(rng)
    both = layers.Dense(2 * size)(x)
    return ops.multiply(*ops.split(both, 2, axis=-1))


def normalized(rng, x):
    kinds = [layers.LayerNormalization, layers.BatchNormalization, layers.UnitNormalization]
    return kinds[rng.integers(len(kinds))]()(x)


def dropped(rng, x):
    return layers.Dropout(0.5)(x)


def sorting(rng, x):
    axis = int(rng.integers(1, len(x.shape)))
    k = int(rng.integers(1, x.shape[-1] + 1))
    functions = [
        lambda h: ops.top_k(h, k)[0],
        lambda h: ops.sort(h, axis=axis),
        lambda h: ops.take_along_axis(h, ops.argsort(h, axis=axis), axis=axis),
        lambda h: ops.max(h, axis=axis, keepdims=True) + h,
        lambda h: ops.one_hot(ops.argmax(h, axis=-1), 5) * ops.sum(h, -1, keepdims=True),
        lambda h: ops.median(h, axis=-1, keepdims=True) - h,
    ]
    return Apply(functions[rng.integers(len(functions))])(x)


def moving(rng, x):
    axis = int(rng.integers(1, len(x.shape)))
    length = x.shape[axis]
    at = [int(i) for i in rng.integers(0, length, 3)]
    functions = [
        lambda h: ops.cumsum(h, axis=axis),
        lambda h: ops.flip(h, axis=axis),
        lambda h: ops.roll(h, 1, axis=axis),
        lambda h: ops.take(h, at, axis=axis),
        lambda h: ops.repeat(h, 2, axis=axis),
        lambda h: ops.diff(ops.concatenate([h, h], axis=axis), axis=axis),
        lambda h: ops.cumprod(ops.tanh(h), axis=axis),
        lambda h: ops.where(h > 0, h, ops.flip(h, axis=axis)),
    ]
    return Apply(functions[rng.integers(len(functions))])(x)


def merged(rng, x):
    """Dims taken apart, swapped and merged again."""
    *outer, last = x.shape[1:]
    factors = [n for n in range(1, last + 1) if last % n == 0]
    one = int(rng.choice(factors))
    apart = layers.Reshape((*outer, one, last // one))(x)
    order = [int(i) for i in rng.permutation(len(apart.shape) - 1) + 1]
    swapped = layers.Permute(order)(apart)
    if rng.random() < 0.5:
        return layers.Reshape((-1, swapped.shape[-1]))(swapped)
    rest = math.prod(swapped.shape[2:])
    return layers.Reshape((swapped.shape[1], rest))(swapped)


def branching(rng, x):
    def choose(h):
        return tf.cond(tf.reduce_mean(h) > 0, lambda: h * 2.0, lambda: tf.nn.softmax(h))

    return Apply(choose)(x)


def looping(rng, x):
    times = int(rng.integers(1, 4))

    def loop(h):
        _, out = tf.while_loop(
            lambda i, _: i < times,
            lambda i, v: (i + 1, tf.tanh(v) + tf.reduce_mean(h, -1, keepdims=True)),
            (0, h),
            maximum_iterations=times,
        )
        out.set_shape(h.shape)
        return out

    return Apply(loop)(x)


def segments(rng, x):
    """Rows summed by numbers that they are given, over the whole batch."""
    count = _size(rng)

    def summed(h):
        rows = tf.reshape(h, (-1, h.shape[-1]))
        ids = tf.cast(tf.abs(rows[:, 0]) * 3.0, tf.int32) % count
        sums = tf.math.unsorted_segment_sum(rows, ids, count)
        return h + tf.reshape(tf.gather(sums, ids), tf.shape(h))

    return Apply(summed)(x)


def looked_up(rng, x):
    """A table read at places that hang on the data."""
    count = int(rng.choice([7, 12, 13]))
    places = ops.cast(ops.clip(ops.abs(ops.mean(x, axis=-1)) * 9, 0, count - 1), "int32")
    found = layers.Embedding(count, _size(rng))(places)
    return layers.concatenate([x, found])


def experts(rng, x):
    """Each sample through the experts that it scores highest."""
    count, size = int(rng.choice([3, 4, 6])), x.shape[-1]

    def mixed(h):
        scores, chosen = ops.top_k(ops.softmax(h), min(2, size))
        return h * ops.sum(scores, -1, keepdims=True) + ops.sum(ops.one_hot(chosen, size), axis=-2)

    gate = layers.Dense(count, "softmax")(x)
    outs = [layers.Dense(size)(x) for _ in range(count)]
    stacked = ops.stack(outs, axis=-2)
    return Apply(mixed)(ops.sum(stacked * ops.expand_dims(gate, -1), axis=-2))


ANY = (
    dense,
    residual,
    shared,
    pieces,
    gated,
    normalized,
    dropped,
    sorting,
    moving,
    merged,
    branching,
    looping,
    segments,
    looked_up,
    experts,
)


# --- of vectors, sequences, images ----------------------------------------------------------


def unfolded(rng, x):
    """A vector as a sequence."""
    factors = [n for n in range(1, x.shape[1] + 1) if x.shape[1] % n == 0]
    return layers.Reshape((int(rng.choice(factors)), -1))(x)


def attended(rng, x):
    heads, size = int(rng.choice([1, 2, 3])), int(rng.choice([2, 3, 4]))
    return layers.MultiHeadAttention(heads, size)(x, x, use_causal_mask=bool(rng.random() < 0.5))


def recurrent(rng, x):
    kinds = [layers.LSTM, layers.GRU, layers.SimpleRNN]
    layer = kinds[rng.integers(3)](_size(rng), return_sequences=bool(rng.random() < 0.5))
    return layers.Bidirectional(layer)(x) if rng.random() < 0.3 else layer(x)


def convolved(rng, x):
    padding = str(rng.choice(["same", "causal"]))
    return layers.Conv1D(_size(rng), int(rng.integers(1, 4)), padding=padding)(x)


def pooled(rng, x):
    kinds = [layers.GlobalAveragePooling1D, layers.GlobalMaxPooling1D, layers.Flatten]
    return kinds[rng.integers(3)]()(x)


def fused_attention(rng, x):
    """Queries, keys and values of one matrix, which is taken apart by a reshape."""
    heads, size = int(rng.choice([2, 3])), int(rng.choice([2, 3]))
    both = layers.Dense(3 * heads * size)(x)
    q, k, v = ops.unstack(layers.Reshape((x.shape[1], 3, heads, size))(both), axis=2)
    scores = ops.softmax(ops.einsum("bqhd,bkhd->bhqk", q, k))
    return layers.Reshape((x.shape[1], heads * size))(ops.einsum("bhqk,bkhd->bqhd", scores, v))


def image_convolved(rng, x):
    kinds = [layers.Conv2D, layers.SeparableConv2D, layers.Conv2DTranspose]
    kind, stride = kinds[rng.integers(3)], int(rng.integers(1, 3))
    if kind is layers.Conv2DTranspose and min(x.shape[1:3]) > 8:
        stride = 1
    return kind(_size(rng), int(rng.integers(1, 4)), stride, "same", use_bias=False)(x)


def depthwise(rng, x):
    return layers.DepthwiseConv2D(3, padding="same", depth_multiplier=int(rng.integers(1, 3)))(x)


def image_pooled(rng, x):
    kind = layers.MaxPooling2D if rng.random() < 0.5 else layers.AveragePooling2D
    return kind(int(rng.integers(1, 4)), int(rng.integers(1, 3)), "same")(x)


def cell(rng, x):
    """As in NASNet: pairs of branches added up, and their sums concatenated."""
    size, count = _size(rng), int(rng.integers(2, 7))
    x = layers.BatchNormalization()(layers.Conv2D(size, 1, use_bias=False)(layers.ReLU()(x)))
    sums = []
    for _ in range(count):
        one = layers.SeparableConv2D(size, 3, padding="same", use_bias=False)(layers.ReLU()(x))
        one = layers.BatchNormalization()(one)
        other = layers.AveragePooling2D(3, 1, "same")(x) if rng.random() < 0.5 else x
        sums.append(layers.add([one, other]))
    return layers.concatenate([x, *sums] if rng.random() < 0.5 else sums)


def resized(rng, x):
    kind = rng.integers(3)
    if kind == 0:
        return layers.Cropping2D(((0, 1), (1, 0)))(layers.ZeroPadding2D(1)(x))
    if kind == 1:
        interpolation = str(rng.choice(["nearest", "bilinear"]))
        return layers.UpSampling2D((2, 1), interpolation=interpolation)(x)
    return layers.Resizing(5, 6)(x)


def flattened(rng, x):
    kinds = [
        layers.GlobalAveragePooling2D(),
        layers.GlobalMaxPooling2D(),
        layers.Flatten(),
        layers.Reshape((-1, x.shape[-1])),
    ]
    return kinds[rng.integers(4)](x)


BY_RANK: dict[int, tuple[Block, ...]] = {
    2: (*ANY, unfolded),
    3: (*ANY, attended, recurrent, convolved, pooled, fused_attention),
    4: (
        normalized,
        dropped,
        image_convolved,
        depthwise,
        image_pooled,
        cell,
        cell,
        resized,
        flattened,
        moving,
        sorting,
        pieces,
    ),
}

SHAPES = ((7,), (12,), (5, 6), (6, 4), (3, 11), (8, 8, 3), (6, 10, 5))

LARGEST = 6000
"""Entries of a sample at which no block follows but one that pools."""


class TwoSteps(keras.Model):
    """A train step of one's own: gradients are clipped, and added to those of a penalty."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted)
            loss += 0.01 * tf.add_n([tf.reduce_sum(w * w) for w in self.trainable_weights])
        gradients = tape.gradient(loss, self.trainable_weights)
        clipped, norm = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply(clipped, self.trainable_weights)
        return {"loss": loss, "norm": norm}


def random_model(seed: int) -> tuple[Callable[[], keras.Model], int, tuple]:
    """(a function that makes the compiled model, its batch, specs of a batch)."""
    start = np.random.default_rng(seed)
    batch = int(start.choice(BATCHES))
    shape = SHAPES[start.integers(len(SHAPES))]

    def build() -> keras.Model:
        rng = np.random.default_rng((seed, 1))
        inputs = x = keras.Input(shape)
        outputs = []
        for _ in range(int(rng.integers(2, 6))):
            choices = BY_RANK[len(x.shape)] if len(x.shape) in BY_RANK else (flat,)
            if math.prod(x.shape[1:]) > LARGEST:
                choices = (flattened,) if len(x.shape) == 4 else (pooled,)
            x = choices[rng.integers(len(choices))](rng, x)
        outputs.append(layers.Dense(_size(rng), name="head")(x))
        if rng.random() < 0.3:
            outputs.append(layers.Dense(3, "softmax", name="other")(layers.Flatten()(x)))
        kind = TwoSteps if rng.random() < 0.2 and len(outputs) == 1 else keras.Model
        model = kind(inputs, outputs)
        model.compile("sgd", "mse")
        return model

    keras.utils.set_random_seed(seed)
    made = build()
    labels = [tf.TensorSpec((batch, *out.shape[1:])) for out in made.outputs]
    data = tf.TensorSpec((batch, *shape)), labels if len(labels) > 1 else labels[0]
    return build, batch, data


def flat(rng, x):
    return layers.Flatten()(x)


def captured(seed: int) -> Captured:
    """The step of a random model, captured to be planned."""
    return Captured.of(*random_model(seed))
