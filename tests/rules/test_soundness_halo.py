"""Ops with windows whose spatial dims are split, against the plain ops."""

import pytest
import tensorflow as tf

from tests.partitioned import Traced, was_split
from tests.rules.test_soundness_conv import f, with_gradients
from tfpar.spec import Mesh, Replicate, Shard

R, B, H, W = Replicate(), Shard(0), Shard(1), Shard(2)
MESHES = {1: Mesh.of([2]), 2: Mesh.of([2, 2])}
FOUR = Mesh.of([4])

LAYOUTS = ((H,), (W,), (H, H), (W, H), (B, H), (W, B))
"""How images lie: split along a spatial dim, along it twice, along both, and with the batch."""


def run_all(function, args, layouts=LAYOUTS, atol=2e-4, rest=None):
    """The checked runs of `function` with its first argument laid as each of `layouts`.

    Args:
        rest: how the other arguments lie; whole if it is not given.
    """
    traced = Traced.of(function, args)
    runs = []
    for spec in layouts:
        others = rest or [(R,) * len(spec)] * (len(args) - 1)
        runs.append(traced.check([spec, *others], MESHES[len(spec)], rtol=2e-4, atol=atol))
    return runs


def collectives(run, kind):
    return [size for name, _, size in run.partitioned.collectives() if name == kind]


@pytest.mark.parametrize("padding, size, stride, dilation", [
    ("SAME", 3, 1, 1), ("SAME", 2, 1, 1), ("SAME", 5, 1, 1), ("SAME", 3, 2, 1),
    ("SAME", 1, 1, 1), ("SAME", 3, 1, 2), ("VALID", 2, 2, 1),
])  # fmt: skip
def test_conv2d(padding, size, stride, dilation):
    runs = run_all(
        with_gradients(lambda x, k: tf.nn.conv2d(x, k, stride, padding, dilations=dilation)),
        [f(2, 16, 16, 3), f(size, size, 3, 4)], atol=2e-3,
    )  # fmt: skip
    for op_type in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"):
        assert was_split(runs, op_type, "h") and was_split(runs, op_type, "w"), op_type


def test_windows_that_skip_rows():
    """TensorFlow's gradient of such a filter crashes now and then on a CPU, so it is left out."""
    kernel = f(1, 1, 3, 4)
    runs = run_all(with_gradients(lambda x: tf.nn.conv2d(x, kernel, 2, "VALID")), [f(2, 16, 16, 3)])
    for op_type in ("Conv2D", "Conv2DBackpropInput"):
        assert was_split(runs, op_type, "h") and was_split(runs, op_type, "w"), op_type


def test_max_pool():
    def pools(x):
        return [tf.nn.max_pool2d(x, 3, 2, "SAME"), tf.nn.max_pool2d(x, 2, 2, "SAME")]

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = pools(x)
            loss = sum(tf.reduce_sum(y * y) for y in made)
        return [*made, tape.gradient(loss, x), *pools(-tf.abs(x))]

    runs = run_all(function, [f(2, 16, 16, 3)])
    for op_type in ("MaxPool", "MaxPoolGrad"):
        assert was_split(runs, op_type, "h") and was_split(runs, op_type, "w"), op_type
