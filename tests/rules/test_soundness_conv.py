"""Convolutions, pooling and their gradients against the plain ops."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import MESHES, sweep, was_split

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def with_gradients(function):
    """`function` and the gradients of a weighting of its result by a like-sized constant."""

    def both(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            out = function(*args)
            ramp = tf.reshape(tf.range(out.shape.num_elements(), dtype=out.dtype), out.shape)
            loss = tf.reduce_sum(out * out * tf.cos(ramp))
        return [out, *tape.gradient(loss, args)]

    return both


def test_conv2d_and_gradients():
    runs = sweep(
        with_gradients(lambda x, k: tf.nn.conv2d(x, k, [1, 2, 2, 1], "SAME")),
        [f(5, 5, 4, 3), f(3, 3, 3, 4)],
        trials=4,
        atol=2e-4,
    )
    assert all(was_split(runs, "Conv2D", k) for k in "bio")
    assert all(was_split(runs, "Conv2DBackpropInput", k) for k in "bio")
    assert all(was_split(runs, "Conv2DBackpropFilter", k) for k in "bio")


@pytest.mark.slow
def test_conv2d_dilated_and_with_explicit_padding():
    runs = sweep(
        with_gradients(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME", dilations=2)),
        [f(3, 6, 6, 4), f(2, 2, 4, 5)],
        trials=6,
        atol=2e-4,
    )
    assert all(was_split(runs, "Conv2D", k) for k in "bio")
    sweep(
        with_gradients(lambda x, k: tf.nn.conv2d(x, k, 1, [[0, 0], [1, 2], [0, 1], [0, 0]])),
        [f(3, 4, 4, 3), f(2, 2, 3, 4)],
        trials=3,
        atol=2e-4,
    )


def test_conv2d_channels_first():
    """Kernels for this format are rare on CPU: the forward op alone."""
    runs = sweep(
        lambda x, k: tf.nn.conv2d(x, k, [1, 1, 2, 2], "SAME", data_format="NCHW"),
        [f(3, 4, 6, 6), f(2, 2, 4, 5)],
        trials=3,
    )
    assert all(was_split(runs, "Conv2D", k) for k in "bio")


def test_grouped_conv2d_splits_its_batch_only():
    runs = sweep(
        with_gradients(lambda x, k: tf.nn.conv2d(x, k, 1, "VALID")),
        [f(4, 4, 4, 6), f(2, 2, 3, 4)],
        trials=3,
        atol=2e-4,
    )
    assert was_split(runs, "Conv2D", "b")
    assert not was_split(runs, "Conv2D", "i") and not was_split(runs, "Conv2D", "o")


@pytest.mark.slow
def test_conv3d_and_gradients():
    runs = sweep(
        with_gradients(lambda x, k: tf.nn.conv3d(x, k, [1, 1, 2, 1, 1], "SAME")),
        [f(3, 3, 4, 3, 3), f(2, 2, 2, 3, 4)],
        trials=6,
        atol=5e-4,
    )
    assert all(was_split(runs, "Conv3D", k) for k in "bio")
    assert all(was_split(runs, "Conv3DBackpropInputV2", k) for k in "bio")
    assert all(was_split(runs, "Conv3DBackpropFilterV2", k) for k in "bio")


def test_generic_conv():
    sweep(
        lambda x, k: tf.raw_ops.Conv(input=x, filter=k, strides=[1] * 4, padding="SAME"),
        [f(3, 4, 4, 3), f(2, 2, 3, 4)],
        trials=3,
        meshes=MESHES[1:],
    )


@pytest.mark.slow
@pytest.mark.parametrize("multiplier", [1, 3])
def test_depthwise_and_gradients(multiplier):
    runs = sweep(
        with_gradients(lambda x, k: tf.nn.depthwise_conv2d(x, k, [1, 1, 1, 1], "SAME")),
        [f(3, 4, 4, 5), f(2, 2, 5, multiplier)],
        trials=4,
        atol=2e-4,
    )
    for op_type in ("", "BackpropInput", "BackpropFilter"):
        for factor in "bcm" if multiplier > 1 else "bc":
            assert was_split(runs, "DepthwiseConv2dNative" + op_type, factor), (op_type, factor)


def test_dilation():
    runs = sweep(
        with_gradients(lambda x, k: tf.nn.dilation2d(x, k, [1] * 4, "SAME", "NHWC", [1, 2, 2, 1])),
        [f(4, 4, 4, 3), f(2, 2, 3)],
        trials=3,
        atol=2e-4,
    )
    for op_type in ("Dilation2D", "Dilation2DBackpropInput", "Dilation2DBackpropFilter"):
        assert was_split(runs, op_type, "b") and was_split(runs, op_type, "c")


@pytest.mark.slow
def test_pooling_and_gradients():
    def pools(x):
        overlapping = tf.nn.max_pool2d(x, 3, 2, "SAME")
        return overlapping + tf.nn.max_pool2d(x, 2, 2, "SAME") + tf.nn.avg_pool2d(x, 2, 2, "SAME")

    runs = sweep(with_gradients(pools), [f(5, 4, 4, 3)], trials=4, atol=2e-4)
    for op_type in ("MaxPool", "AvgPool", "MaxPoolGrad", "AvgPoolGrad"):
        assert was_split(runs, op_type, "b") and was_split(runs, op_type, "c")


@pytest.mark.slow
def test_pooling_3d_and_second_order():
    def pools(x):
        return tf.nn.max_pool3d(x, 2, 2, "SAME") + tf.nn.avg_pool3d(x, 2, 2, "SAME")

    runs = sweep(with_gradients(pools), [f(3, 2, 4, 2, 4)], trials=3, atol=2e-4)
    for op_type in ("MaxPool3D", "AvgPool3D", "MaxPool3DGrad", "AvgPool3DGrad"):
        assert was_split(runs, op_type, "b") and was_split(runs, op_type, "c")
    inner = with_gradients(lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"))
    runs = sweep(with_gradients(lambda x: inner(x)[1]), [f(3, 4, 4, 2)], trials=3, atol=1e-3)
    assert was_split(runs, "MaxPoolGradGrad", "b")


def test_pooling_with_indices_and_fractional():
    runs = sweep(
        lambda x: [
            *tf.nn.max_pool_with_argmax(x, 2, 2, "SAME"),
            *tf.nn.max_pool_with_argmax(x, 2, 2, "SAME", include_batch_in_index=True),
        ],
        [f(4, 4, 4, 3)],
        trials=3,
    )
    assert was_split(runs, "MaxPoolWithArgmax", "b")


def test_patches_and_blocks():
    runs = sweep(
        lambda x: [
            tf.image.extract_patches(x, [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "SAME"),
            tf.nn.space_to_depth(x, 2),
            tf.nn.depth_to_space(tf.tanh(tf.nn.space_to_depth(x, 2)), 2),
        ],
        [f(3, 4, 4, 3)],
        trials=4,
    )
    for op_type in ("ExtractImagePatches", "SpaceToDepth", "DepthToSpace"):
        assert was_split(runs, op_type, "b") and was_split(runs, op_type, "c")


def test_pooling_with_windows_as_operands_or_indices():
    def function(x):
        pooled = tf.raw_ops.MaxPoolV2(
            input=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME"
        )
        with tf.GradientTape() as tape:
            tape.watch(x)
            arg = tf.nn.max_pool_with_argmax(x, 2, 2, "SAME").output
            loss = tf.reduce_sum(arg * arg)
        return [pooled, tape.gradient(loss, x)]

    runs = sweep(function, [f(5, 4, 4, 3)], trials=4)
    for op_type in ("MaxPoolV2", "MaxPoolGradWithArgmax"):
        assert was_split(runs, op_type, "b")


@pytest.mark.slow
def test_second_order_of_pooling():
    """Called by hand: no gradient of TensorFlow's makes all of them."""
    raw = tf.raw_ops

    def flat(x, g):
        window = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
        y = raw.MaxPool(input=x, **window)
        small = raw.AvgPool(value=g, **window)
        return [
            raw.MaxPoolGradV2(orig_input=x, orig_output=y, grad=small, **window),
            raw.MaxPoolGradGradV2(orig_input=x, orig_output=y, grad=g, **window),
        ]

    runs = sweep(flat, [f(5, 4, 4, 3), f(5, 4, 4, 3)], trials=3)
    for op_type in ("MaxPoolGradV2", "MaxPoolGradGradV2"):
        assert was_split(runs, op_type, "b") and was_split(runs, op_type, "c"), op_type

    def deep(x, g):
        window = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "SAME"}
        y = raw.MaxPool3D(input=x, **window)
        return raw.MaxPool3DGradGrad(orig_input=x, orig_output=y, grad=g, **window)

    runs = sweep(deep, [f(3, 2, 4, 2, 5), f(3, 2, 4, 2, 5)], trials=3)
    assert was_split(runs, "MaxPool3DGradGrad", "b") and was_split(runs, "MaxPool3DGradGrad", "c")


def test_patches_of_volumes():
    runs = sweep(
        lambda x: tf.raw_ops.ExtractVolumePatches(
            input=x, ksizes=[1, 2, 1, 2, 1], strides=[1, 1, 1, 2, 1], padding="VALID"
        ),
        [f(3, 3, 2, 4, 5)],
        trials=3,
    )
    assert all(was_split(runs, "ExtractVolumePatches", k) for k in "bc")
