"""Size of an optimizer's slots for each weight, found without creating them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfpar.ir.graph import itemsize


def slot_ratio(model: keras.Model) -> float:
    """Bytes of optimizer slots per byte of weight.

    A copy of the optimizer is built for weights of the model's shapes, at most 64 to a side.
    """
    optimizer = getattr(model, "optimizer", None)
    weights = model.trainable_variables
    if optimizer is None or not weights:
        return 0.0
    shapes = {(tuple(min(n, 64) for n in w.shape), str(w.dtype)) for w in weights}
    small = [
        keras.Variable(np.zeros(shape, "float32"), dtype=dtype, name=f"probe_{i}")
        for i, (shape, dtype) in enumerate(sorted(shapes))
    ]
    probe = type(optimizer).from_config(optimizer.get_config())
    probe.build(small)
    return _bytes(v for v in probe.variables if len(v.shape)) / max(_bytes(small), 1.0)


def _bytes(variables: Any) -> float:
    return float(
        sum(
            np.prod(v.shape) * itemsize(keras.backend.standardize_dtype(v.dtype)) for v in variables
        )
    )
