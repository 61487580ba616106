"""MultiWorkerMirroredStrategy with a custom loop, as `fit` of Keras 3 does not support it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    from benchmarks.by_hand.worker import Make


class MultiWorkerMirrored:
    """Trains on this worker's slice of the batch; `step()` returns the loss of that slice."""

    def __init__(self, make: Make) -> None:
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with self.strategy.scope():
            self.model, x, y = make()
            self.model.optimizer.build(self.model.trainable_variables)
        workers = self.strategy.num_replicas_in_sync
        own = slice(self.strategy.cluster_resolver.task_id, None, workers)
        # A dataset of its own costs less than a distributed one, which asks all workers
        # before each batch whether they have one.
        dataset = tf.data.Dataset.from_tensors((x[own], y[own])).cache().repeat()
        self._batches = iter(dataset)
        self._train = tf.function(self._step, autograph=False, jit_compile=False)

    def step(self) -> tf.Tensor:
        return self._train(*next(self._batches))

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return self.strategy.run(self._replica_step, args=(x, y))

    def _replica_step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            # Keras divides a loss by the number of replicas, and sums gradients over them.
            share = self.model.loss(y, self.model(x, training=True))
        gradients = tape.gradient(share, [v.value for v in variables])
        self.model.optimizer.apply(gradients, variables)
        return share * self.strategy.num_replicas_in_sync
