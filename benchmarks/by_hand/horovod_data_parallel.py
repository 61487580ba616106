"""Data parallelism by hand: each rank has the whole model, Horovod averages the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import horovod.tensorflow as hvd
import tensorflow as tf

if TYPE_CHECKING:
    from benchmarks.by_hand.worker import Make


class HorovodDataParallel:
    """Trains on this rank's slice of the batch; `step()` returns the loss of that slice."""

    def __init__(self, make: Make) -> None:
        hvd.init()
        self.model, x, y = make()
        self.model.optimizer.build(self.model.trainable_variables)
        hvd.broadcast_variables([v.value for v in self.model.variables], root_rank=0)
        own = slice(hvd.rank(), None, hvd.size())
        dataset = tf.data.Dataset.from_tensors((x[own], y[own])).cache().repeat()
        self._batches = iter(dataset)
        self._train = tf.function(self._replica_step, autograph=False, jit_compile=False)

    def step(self) -> tf.Tensor:
        return self._train(*next(self._batches))

    def _replica_step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        variables = [v.value for v in self.model.trainable_variables]
        with tf.GradientTape() as tape:
            loss = self.model.loss(y, self.model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, variables)
        self.model.optimizer.apply(gradients, self.model.trainable_variables)
        return loss
