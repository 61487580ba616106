"""Batch normalisation over parts of the batch on one device ("ghost batches")."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def parts_of(batch: int, ranks: int | Sequence[int], microbatches: int) -> list[list[int]]:
    """The samples of each microbatch, of all data-parallel ranks; none is empty.

    Args:
        ranks: how many, or the samples of each.
    """
    found: list[list[int]] = [[] for _ in range(microbatches)]
    counts = [-(-batch // ranks)] * ranks if isinstance(ranks, int) else ranks
    for rank, each in enumerate(counts):
        first = sum(counts[:rank])
        own = range(batch)[first : first + each]
        size = -(-each // microbatches)
        for micro, samples in enumerate(found):
            samples += own[micro * size : (micro + 1) * size]
    return [samples for samples in found if samples]


class GhostBatchNormalization(layers.BatchNormalization):
    """Normalises each part of the batch by itself.

    Running averages move by the average over parts, each weighted by its samples.

    Args:
        ranks, microbatches: that the batch is cut into; see `parts_of`.
        unbiased: the running variance is, as of fused kernels.
    """

    def __init__(
        self, ranks: int | Sequence[int], microbatches: int, unbiased: bool = False, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.unbiased = unbiased
        self.ranks, self.microbatches = ranks, microbatches

    def call(self, x, training=None):
        if not training:
            return super().call(x, training=False)
        parts = parts_of(x.shape[0], self.ranks, self.microbatches)
        taken = tf.cast(x, "float32")
        dims = [d for d in range(len(x.shape)) if d != self.axis % len(x.shape)]
        shape = [1] * len(x.shape)
        shape[self.axis] = x.shape[self.axis]
        outputs, means, variances = [], [], []
        for samples in parts:
            own = tf.gather(taken, samples)
            mean = tf.reduce_mean(own, dims)
            centred = own - tf.reshape(mean, shape)
            variance = tf.reduce_mean(tf.square(centred), dims)
            scale = tf.math.rsqrt(variance + self.epsilon) * tf.convert_to_tensor(self.gamma)
            offset = tf.reshape(tf.convert_to_tensor(self.beta), shape)
            outputs.append(centred * tf.reshape(scale, shape) + offset)
            means.append(mean)
            count = len(samples) * int(np.prod(x.shape[1:-1]))
            variances.append(variance * (count / (count - 1) if self.unbiased else 1.0))
        share = np.array([len(samples) / x.shape[0] for samples in parts], "float32")
        kept = self.momentum
        for variable, values in (
            (self.moving_mean, means),
            (self.moving_variance, variances),
        ):
            new = tf.tensordot(share, tf.stack(values), 1)
            variable.assign(variable * kept + new * (1.0 - kept))
        order = np.argsort([i for samples in parts for i in samples])
        return keras.ops.cast(tf.gather(tf.concat(outputs, 0), order), self.compute_dtype)
