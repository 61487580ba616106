"""Tensor parallelism by hand, as in Megatron-LM (Shoeybi et al., 2019), over Horovod.

Every rank sees the whole batch and holds a part of the large matrices: heads, the inner
dimension of the feed-forward layers, the vocabulary. What is not split is computed by all
ranks alike, so no gradient is reduced; the plain model gives the initial values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from benchmarks.by_hand.worker import Make


class Megatron:
    """Trains on the whole batch; `step()` returns its loss, the same on all ranks."""

    def __init__(self, make: Make) -> None:
        hvd.init()
        model, x, y = make()
        is_gpt = any(layer.name == "tokens" for layer in model.layers)
        self.network: Gpt | Wide = Gpt(model) if is_gpt else Wide(model)
        self.variables = self.network.variables
        self.optimizer = model.optimizer
        self.optimizer.build(self.variables)
        self._batches = iter(tf.data.Dataset.from_tensors((x, y)).cache().repeat())
        self._train = tf.function(self._step, autograph=False, jit_compile=False)

    def step(self) -> tf.Tensor:
        return self._train(*next(self._batches))

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = split_cross_entropy(self.network(x), tf.reshape(y, [-1]))
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, [v.value for v in self.variables])
        self.optimizer.apply(gradients, self.variables)
        return loss


# --- the models ------------------------------------------------------------------------


class Wide:
    """The body on every rank, the classes of the head split."""

    def __init__(self, model: keras.Model) -> None:
        head = model.get_layer("head")
        self.body = keras.Model(model.input, head.input)
        self.head = ColumnParallel(*head.get_weights())
        self.variables = [*self.body.trainable_variables, *self.head.variables]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """This rank's logits [batch, classes / ranks]."""
        return self.head(enter(self.body(x, training=True)))


class Gpt:
    """Heads, feed-forward layers, the table of tokens and the logits split."""

    def __init__(self, model: keras.Model) -> None:
        layers = {layer.name: layer for layer in model.layers}
        self.table = keras.Variable(own_part(layers["tokens"].get_weights()[0], 0))
        # Of this model the positions are constants, folded into an addition.
        self.add_positions = keras.Model(layers["tokens"].output, layers["block_0_ln1"].input)
        count = sum(name.endswith("_attention") for name in layers)
        self.blocks = [Block(layers, f"block_{i}") for i in range(count)]
        self.norm = layers["ln"]
        self.head = ColumnParallel(*layers["head"].get_weights())
        self.variables = [self.table, *self.norm.trainable_variables, *self.head.variables]
        for block in self.blocks:
            self.variables += block.variables

    def __call__(self, tokens: tf.Tensor) -> tf.Tensor:
        """This rank's logits [batch * length, vocabulary / ranks]."""
        batch, length = tokens.shape
        rows = self.table.shape[0]
        local, is_own = local_index(tokens, rows)
        looked_up = tf.gather(self.table.value, local) * tf.cast(is_own, tf.float32)[..., None]
        x = self.add_positions(leave(looked_up))
        x = tf.reshape(x, [batch * length, -1])
        for block in self.blocks:
            x = block(x, batch, length)
        return self.head(enter(self.norm(x)))


class Block:
    """Attention over this rank's heads and a feed-forward layer of its inner part."""

    def __init__(self, layers: dict[str, keras.Layer], name: str) -> None:
        weights = layers[f"{name}_attention"].get_weights()
        query_key_value, (out_kernel, out_bias) = weights[:6], weights[6:]
        hidden, heads, self.head_dim = query_key_value[0].shape
        self.heads = heads // hvd.size()
        kernels = [own_part(w, 1).reshape(hidden, -1) for w in query_key_value[::2]]
        biases = [own_part(b, 0).reshape(-1) for b in query_key_value[1::2]]
        self.qkv_kernel = keras.Variable(np.concatenate(kernels, axis=1))
        self.qkv_bias = keras.Variable(np.concatenate(biases))
        self.out = RowParallel(out_kernel.reshape(-1, hidden), out_bias)
        self.fc1 = ColumnParallel(*layers[f"{name}_fc1"].get_weights())
        self.fc2 = RowParallel(*layers[f"{name}_fc2"].get_weights())
        self.norm1, self.norm2 = layers[f"{name}_ln1"], layers[f"{name}_ln2"]
        self.variables = [self.qkv_kernel, self.qkv_bias]
        for part in (self.out, self.fc1, self.fc2):
            self.variables += part.variables
        self.variables += self.norm1.trainable_variables + self.norm2.trainable_variables

    def __call__(self, x: tf.Tensor, batch: int, length: int) -> tf.Tensor:
        """`x` [batch * length, hidden], the same on all ranks, as is what comes back."""
        x = x + self.out(self._attend(enter(self.norm1(x)), batch, length))
        inner = tf.nn.gelu(self.fc1(enter(self.norm2(x))), approximate=False)
        return x + self.fc2(inner)

    def _attend(self, x: tf.Tensor, batch: int, length: int) -> tf.Tensor:
        qkv = tf.matmul(x, self.qkv_kernel) + self.qkv_bias
        qkv = tf.reshape(qkv, [batch, length, 3, self.heads, self.head_dim])
        query, key, value = tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4]))
        scores = tf.matmul(query * self.head_dim**-0.5, key, transpose_b=True)
        future = 1.0 - tf.linalg.band_part(tf.ones([length, length]), -1, 0)
        mixed = tf.matmul(tf.nn.softmax(scores - 1e9 * future), value)
        return tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [batch * length, -1])


class ColumnParallel:
    """A dense layer of which each rank has columns, and of its output too."""

    def __init__(self, kernel: np.ndarray, bias: np.ndarray) -> None:
        self.kernel = keras.Variable(own_part(kernel, 1))
        self.bias = keras.Variable(own_part(bias, 0))
        self.variables = [self.kernel, self.bias]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, self.kernel) + self.bias


class RowParallel:
    """A dense layer of which each rank has rows, and columns of its input; the output is whole."""

    def __init__(self, kernel: np.ndarray, bias: np.ndarray) -> None:
        self.kernel = keras.Variable(own_part(kernel, 0))
        self.bias = keras.Variable(bias)
        self.variables = [self.kernel, self.bias]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return leave(tf.matmul(x, self.kernel)) + self.bias


# --- between ranks ---------------------------------------------------------------------


def own_part(value: np.ndarray, dim: int) -> np.ndarray:
    """This rank's part of `value`; ValueError if `dim` does not divide by the ranks."""
    return np.split(value, hvd.size(), axis=dim)[hvd.rank()]


def local_index(index: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Where `index` is in this rank's part of `size` rows, and whether it is (else 0)."""
    local = index - hvd.rank() * size
    is_own = (local >= 0) & (local < size)
    return tf.where(is_own, local, 0), is_own


@tf.custom_gradient
def enter(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """From where all ranks compute alike to where they differ: sums the gradients."""
    return tf.identity(x), lambda upstream: hvd.allreduce(upstream, op=hvd.Sum)


@tf.custom_gradient
def leave(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """From where the ranks differ to where they compute alike: sums the values."""
    return hvd.allreduce(x, op=hvd.Sum), lambda upstream: upstream


def split_cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """The losses [rows] of logits [rows, classes / ranks] against `labels` of all classes.

    One all-gather of two numbers a row; the rest is TensorFlow's fused op on the own classes.
    """
    local, is_own = local_index(labels, logits.shape[1])

    @tf.custom_gradient
    def of_logits(logits):
        loss, gradient = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
            features=logits, labels=local
        )
        picked = tf.gather(logits, local, batch_dims=1)
        own_sum = loss + picked  # the logarithm of the sum of the exponentials
        picked = tf.where(is_own, picked, 0.0)
        sums, picks = tf.unstack(hvd.allgather(tf.stack([own_sum, picked])[None]), axis=1)
        whole_sum = tf.reduce_logsumexp(sums, axis=0)

        def backward(upstream):
            # `gradient` is the softmax of the own classes less 1 at `local`.
            scale = tf.exp(own_sum - whole_sum)
            at_local = (scale - tf.cast(is_own, tf.float32)) * upstream
            where = tf.stack([tf.range(logits.shape[0]), local], axis=1)
            scaled = gradient * (scale * upstream)[:, None]
            return tf.tensor_scatter_nd_add(scaled, where, at_local)

        return whole_sum - tf.reduce_sum(picks, axis=0), backward

    return of_logits(logits)
