"""Measurement of a script's model under several plans, on this machine in one process."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar.api import auto_parallel
from tfpar.cli.model import Made
from tfpar.cli.script import scripts
from tfpar.plans import Plan
from tfpar.tf.capture.step import argument_specs
from tfpar.tf.keras import adapter

STEPS_A_ROUND = 3
"""Plans take turns: what else the machine does slows all of them."""

WARM_UP = 2


def step_seconds(options: argparse.Namespace, plans: tuple[Plan, Plan]) -> tuple[float, float]:
    """The median of what steps take under each of two plans, in seconds.

    Args:
        options: of `problem.add_model`, and `steps`.

    Raises:
        TfparError: the script gives no model, or one that a plan is not for.
    """
    adapter.install()
    with scripts() as load:
        runs = [
            _Run(Made.of(options, load, auto_parallel(plan=plan, verbose=False))) for plan in plans
        ]
        while min(len(run.seconds) for run in runs) < options.steps:
            for run in runs:
                run.train(STEPS_A_ROUND)
        first, second = (statistics.median(run.seconds[: options.steps]) for run in runs)
    return first, second


class _Run(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """A model in training, and what its steps took."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._model, self._batch = made.model, _as_arrays(made.batch)
        self._began = 0.0
        self.train(WARM_UP)  # compiles
        self.seconds.clear()

    def train(self, steps: int) -> None:
        """Train so many steps on the same batch."""
        data = tf.data.Dataset.from_tensors(self._batch).repeat(steps)
        self._model.fit(data, shuffle=False, verbose=0, callbacks=[self])

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def _as_arrays(batch: Any) -> Any:
    """The batch with zeros where only shapes are given."""
    specs = argument_specs((batch,))[0]
    flat = [
        np.zeros(spec.shape, spec.dtype.as_numpy_dtype) if isinstance(value, tf.TypeSpec) else value
        for spec, value in zip(tf.nest.flatten(specs), tf.nest.flatten(batch), strict=True)
    ]
    return tf.nest.pack_sequence_as(batch, flat)
