"""Numbers that tell whether two tensors hold the same, and how far apart they are if not."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

_BLOCK = 1 << 20  # entries that are widened at once
_DEVIATION = 73.9  # of the numbers that are drawn


def row_fingerprints(tensor: tf.Tensor) -> np.ndarray:
    """64 bits (uint64) of each entry of the first dimension, one of a scalar.

    They tell whether bytes, or strings, are the same, on all machines alike, at the speed of
    memory.
    """
    with tf.device("CPU:0"):
        data = tensor if tensor.shape.rank else tf.reshape(tensor, [1])
        made = tf.raw_ops.Fingerprint(data=data, method="farmhash64")
    return np.asarray(made).view(np.uint64).reshape(-1)


def fingerprint(tensor: tf.Tensor) -> int:
    """64 bits of all of a tensor, as a signed integer."""
    (bits,) = row_fingerprints(tf.reshape(tensor, [1, -1]))
    return int(bits.astype(np.int64))


class Traits(NamedTuple):
    """Fingerprint of an array of numbers that tolerates rounding.

    Attributes:
        projection: on random numbers, the same for all arrays, over the root of the number of
            entries. Those of two arrays are about as far apart as their entries are.
        size: root mean square.
    """

    projection: float
    size: float


def traits(value: np.ndarray) -> Traits:
    """Compute the traits of all entries; complex ones count with their absolute values."""
    flat = np.ascontiguousarray(value).reshape(-1)
    draw = np.random.default_rng(0)
    projection = squares = 0.0
    for begin in range(0, flat.size, _BLOCK):
        block = flat[begin : begin + _BLOCK]
        wide = np.abs(block) if block.dtype.kind == "c" else block.astype("float64")
        odd = draw.integers(-64, 64, block.size, np.int8) * 2 + 1
        projection += float(wide @ odd) / _DEVIATION
        squares += float(wide @ wide)
    root = max(1, flat.size) ** 0.5
    return Traits(projection / root, squares**0.5 / root)
