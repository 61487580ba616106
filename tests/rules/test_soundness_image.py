"""Image ops against the plain ops."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import sweep, was_split

rng = np.random.default_rng(0)


def f(*shape):
    return rng.uniform(size=shape).astype("float32")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["bilinear", "nearest", "bicubic", "area", "lanczos3"])
def test_resize_and_gradient(method):
    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.image.resize(x, [5, 7], method)
            loss = tf.reduce_sum(y * y)
        if method == "area":
            return y
        return y, tape.gradient(loss, x)

    runs = sweep(function, [f(5, 4, 4, 3)], trials=3, atol=1e-4)
    op_type = {
        "bilinear": "ResizeBilinear",
        "nearest": "ResizeNearestNeighbor",
        "bicubic": "ResizeBicubic",
        "area": "ResizeArea",
        "lanczos3": "ScaleAndTranslate",
    }[method]
    for name in (op_type,) if method == "area" else (op_type, op_type + "Grad"):
        assert was_split(runs, name, "b") and was_split(runs, name, "c"), name


@pytest.mark.parametrize("count", [1, 5])
def test_projective_transform(count):
    moves = np.tile(np.array([[1, 0.1, 0.5, 0, 1, -0.7, 0, 0]], "float32"), (count, 1))
    runs = sweep(
        lambda x, t: (
            tf.raw_ops.ImageProjectiveTransformV3(
                images=x,
                transforms=t,
                output_shape=[4, 3],
                fill_value=0.5,
                interpolation="BILINEAR",
            )
            + tf.raw_ops.ImageProjectiveTransformV2(
                images=x, transforms=t, output_shape=[4, 3], interpolation="NEAREST"
            )
        ),
        [f(5, 4, 4, 3), moves],
        trials=3,
    )
    for op_type in ("ImageProjectiveTransformV2", "ImageProjectiveTransformV3"):
        assert was_split(runs, op_type, "b") and was_split(runs, op_type, "c")


def test_colors():
    def function(x):
        hsv = tf.image.rgb_to_hsv(x)
        return [
            tf.image.adjust_contrast(x, 1.5),
            tf.image.adjust_hue(x, 0.1),
            tf.image.adjust_saturation(x, 0.7),
            hsv,
            tf.image.hsv_to_rgb(hsv),
        ]

    runs = sweep(function, [f(5, 4, 4, 3)], trials=4)
    for name in ("AdjustContrastv2", "AdjustHue", "AdjustSaturation", "RGBToHSV", "HSVToRGB"):
        factor = "_0" if name == "AdjustContrastv2" else "_2"
        assert was_split(runs, name, factor), name


def test_crop_and_resize_and_gradients():
    def function(image, boxes):
        index = tf.constant([2, 0, 1, 2, 1])
        with tf.GradientTape() as tape:
            tape.watch([image, boxes])
            y = tf.image.crop_and_resize(image, boxes, index, [3, 3])
            loss = tf.reduce_sum(y * y)
        return [y, *tape.gradient(loss, [image, boxes])]

    corners = f(5, 2) / 2
    boxes = np.concatenate([corners, corners + 0.4], 1)
    runs = sweep(function, [f(3, 6, 6, 4), boxes], trials=5, atol=2e-4)
    for name in ("CropAndResize", "CropAndResizeGradImage", "CropAndResizeGradBoxes"):
        assert was_split(runs, name, "n") and was_split(runs, name, "c"), name
