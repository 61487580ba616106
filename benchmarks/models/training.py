"""What the models are trained on: random batches, a loss, an optimizer."""

from __future__ import annotations

import keras
import numpy as np

from benchmarks.models.clip import ContrastiveLoss


def batch_of(model: keras.Model, size: int = 8, seed: int = 0):
    """Random `(x, y)` for any model of this package."""
    rng = np.random.default_rng(seed)
    x = [_random(rng, model, size, spec) for spec in model.inputs]
    *dims, classes = model.output.shape[1:]
    if classes is None:  # an image and its text, as many as the batch is large
        y = np.arange(size, dtype="int32")
    else:
        y = rng.integers(0, classes, (size, *dims)).astype("int32")
    return (x if len(x) > 1 else x[0]), y


def _random(rng: np.random.Generator, model: keras.Model, size: int, spec: keras.KerasTensor):
    shape = (size, *spec.shape[1:])
    if "int" in spec.dtype:
        return rng.integers(0, model.get_layer("tokens").input_dim, shape).astype("int32")
    return rng.standard_normal(shape).astype("float32")


def gpt_batch(batch: int = 8, length: int = 128, vocabulary: int = 8000):
    tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1)).astype("int32")
    return tokens[:, :-1], tokens[:, 1:]


def wide_batch(batch: int = 32, classes: int = 50_000):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, 784)).astype("float32")
    return x, rng.integers(0, classes, batch).astype("int32")


def loss_of(model: keras.Model) -> keras.losses.Loss:
    """Cross-entropy; of CLIP in both directions."""
    if model.output.shape[-1] is None:
        return ContrastiveLoss()
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compile_model(
    model: keras.Model, optimizer: str = "adam", jit_compile: bool = False
) -> keras.Model:
    model.compile(optimizer, loss_of(model), jit_compile=jit_compile)
    return model
