"""A training that a batch system interrupts: `python resumed.py FOLDER`, with checkpoints there."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfpar as tap

BATCH, EPOCHS = 8, 10


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(64, 8)).astype("float32"), rng.integers(0, 4, 64)


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train(model: keras.Model, callbacks: list[keras.callbacks.Callback]) -> np.ndarray:
    model.fit(
        *data(), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks
    )
    return np.concatenate([np.ravel(value) for value in model.get_weights()])


class Steps(keras.callbacks.Callback):
    """Notes each step; until the job has been queued again it is slow, to be met in the middle."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._notes = folder / f"steps.{os.environ.get('SLURM_RESTART_COUNT', 0)}"

    def on_train_batch_end(self, batch, logs=None):
        if os.environ["SLURM_PROCID"] == "0":
            with self._notes.open("a") as notes:
                notes.write(f"{int(self.model.optimizer.iterations)}\n")
        if "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(0.05)


def main(folder: Path) -> None:
    with tap.auto_parallel(tap.split([2]), tap.batch("data"), planner=None):
        model = build()
    weights = train(model, [Steps(folder), tap.Checkpoint(folder / "checkpoints", every=1000)])
    np.save(folder / f"weights.{os.environ['SLURM_PROCID']}.npy", weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
