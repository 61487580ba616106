"""The same models by tfpar, one rank a process: what the baselines are compared with."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np

import tfpar as tap
from benchmarks import models
from benchmarks.workers import endless

Make = Callable[[], tuple[keras.Model, np.ndarray, np.ndarray]]


class WithTfpar:
    """Plain `fit` of a model built under `auto_parallel`.

    Args:
        make: builds and compiles the model, and its batch.
        name: of the model.
        layout: `data`, `model` (Megatron's, as in `benchmarks.models.layout`) or `searched`.
        ranks: how many processes.
    """

    def __init__(self, make: Make, name: str, layout: str, ranks: int) -> None:
        if layout == "searched":
            context = tap.auto_parallel(tap.split([ranks]))
        elif layout == "model":
            constraints = models.layout(name.partition("-")[0])
            context = tap.auto_parallel(tap.split([1, ranks]), constraints, planner=None)
        else:
            context = tap.auto_parallel(tap.split([ranks, 1]), planner=None)
        with context:
            self.model, x, y = make()
        self._batches = endless((x, y))

    def steps(self, count: int) -> list[float]:
        """The losses of as many steps."""
        losses = _Losses()
        self.model.fit(self._batches, steps_per_epoch=count, verbose=0, callbacks=[losses])
        return losses.values


class _Losses(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []
        self._sum = 0.0

    def on_train_batch_end(self, batch, logs=None):
        total = float(logs["loss"]) * (batch + 1)  # Keras gives the mean so far
        self.values.append(total - self._sum)
        self._sum = total
