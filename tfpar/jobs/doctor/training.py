"""The tiny training of the trials: two steps, whose losses a plain Keras model has too.

`python -m tfpar.jobs.doctor.training` trains it by two ranks in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import keras
import numpy as np

import tfpar as tap
from tfpar.spec.errors import TfparError

_BATCH, _FEATURES, _STEPS = 8, 16, 2
_TOLERANCE = 1e-4  # float32, in another order


def check_training(mesh: tap.Mesh) -> list[float]:
    """Train on `mesh`; returns the loss of each step.

    Raises:
        TfparError: they are not those of one device.
    """
    expected = _losses(contextlib.nullcontext)
    found = _losses(lambda: tap.auto_parallel(mesh))
    if not np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise TfparError(f"Two steps have the losses {found}, and on one device {expected}.")
    return found


def _losses(parallel: Callable[[], AbstractContextManager[object]]) -> list[float]:
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_BATCH, _FEATURES)).astype("float32")
    y = rng.integers(0, 4, size=_BATCH)
    with parallel():
        model = keras.Sequential(
            [keras.Input((_FEATURES,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(4)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
    return [float(model.train_on_batch(x, y)) for _ in range(_STEPS)]


def main() -> None:
    """Train a tiny model by two ranks in this process; raises whatever goes wrong."""
    first, *_, last = check_training(tap.split([2]))
    print(f"two ranks in one process train as one device does (loss {first:.3f}, {last:.3f})")


if __name__ == "__main__":
    main()
