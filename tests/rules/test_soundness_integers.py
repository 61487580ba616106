"""Integer arithmetic that refuses some operands, on shards with padding."""

import numpy as np
import tensorflow as tf

from tests.partitioned import sweep, was_split

VALUES = np.array([3, 1, 4, 1, 5], "int32")


def test_padding_is_no_divisor_and_no_exponent():
    raw = tf.raw_ops

    def function(x, y):
        return (
            x // y,
            x % y,
            tf.truncatediv(x, y),
            tf.truncatemod(x, y),
            raw.Div(x=x, y=y),
            raw.Mod(x=x, y=y),
            tf.pow(x, y - 1),
            tf.pow(2, y - 1),
            12 // y,
            -7 % y,
        )

    runs = sweep(function, [VALUES * 7 - 20, VALUES], trials=6)
    for op_type in ("FloorDiv", "FloorMod", "TruncateDiv", "TruncateMod", "Div", "Mod", "Pow"):
        assert was_split(runs, op_type, "_0"), op_type


def test_division_of_floats_and_broadcasting():
    x = VALUES.astype("float32")
    runs = sweep(lambda x: (x // 2.0, x % 2.0, x**2.0, x[:, None] // x), [x], trials=4)
    assert was_split(runs, "FloorDiv", "_0") and was_split(runs, "Pow", "_0")
