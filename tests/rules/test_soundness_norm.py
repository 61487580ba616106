"""Fused normalisations against the plain ops: statistics are those of the global batch."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import MESHES, sweep, was_split

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def batch_norm(is_training, factor=1.0):
    def function(x, scale, offset, mean, variance):
        with tf.GradientTape() as tape:
            tape.watch([x, scale, offset])
            y, new_mean, new_variance, *_ = tf.raw_ops.FusedBatchNormV3(
                x=x,
                scale=scale,
                offset=offset,
                epsilon=1e-3,
                is_training=is_training,
                mean=mean if not is_training or factor != 1.0 else [],
                variance=variance if not is_training or factor != 1.0 else [],
                exponential_avg_factor=factor,
            )
            ramp = tf.reshape(tf.range(y.shape.num_elements(), dtype=y.dtype), y.shape)
            loss = tf.reduce_sum(y * y * tf.cos(ramp))
        return [y, new_mean, new_variance, *tape.gradient(loss, [x, scale, offset])]

    return function


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_batch_norm_in_training(factor):
    args = [3 + f(5, 3, 2, 4), f(4), f(4), f(4), np.abs(f(4))]
    runs = sweep(batch_norm(True, factor), args, trials=4, atol=2e-4, rtol=1e-4)
    for op_type in ("FusedBatchNormV3", "FusedBatchNormGradV3"):
        assert was_split(runs, op_type, "b") and was_split(runs, op_type, "c")


@pytest.mark.slow
def test_batch_norm_in_inference():
    args = [f(5, 3, 2, 4), f(4), f(4), f(4), np.abs(f(4))]
    runs = sweep(batch_norm(False), args, trials=4, atol=2e-4, rtol=1e-4)
    for op_type in ("FusedBatchNormV3", "FusedBatchNormGradV3"):
        assert was_split(runs, op_type, "b") and was_split(runs, op_type, "c")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["", "V2"])
@pytest.mark.parametrize("is_training", [True, False])
def test_older_batch_norms(version, is_training):
    """What TensorFlow itself makes no more, but older saved models hold."""

    def function(x, scale, offset, mean, variance, dy):
        call = getattr(tf.raw_ops, f"FusedBatchNorm{version}")
        own = [[], []] if is_training else [mean, variance]
        y, new_mean, new_variance, first, second = call(
            x=x,
            scale=scale,
            offset=offset,
            mean=own[0],
            variance=own[1],
            epsilon=1e-3,
            is_training=is_training,
        )
        gradient = getattr(tf.raw_ops, f"FusedBatchNormGrad{version}")
        kept = (first, second) if is_training else (mean, variance)
        return [
            y,
            new_mean,
            new_variance,
            *gradient(
                y_backprop=dy,
                x=x,
                scale=scale,
                reserve_space_1=kept[0],
                reserve_space_2=kept[1],
                epsilon=1e-3,
                is_training=is_training,
            )[:3],
        ]

    args = [3 + f(5, 3, 2, 4), f(4), f(4), f(4), 1 + np.abs(f(4)), f(5, 3, 2, 4)]
    runs = sweep(function, args, trials=3, meshes=MESHES[1:], atol=2e-4, rtol=1e-4)
    for op_type in ("FusedBatchNorm", "FusedBatchNormGrad"):
        name = op_type + version
        assert was_split(runs, name, "b") and was_split(runs, name, "c"), name


def test_batch_norm_of_halves():
    def function(x, scale, offset):
        y, mean, variance = tf.compat.v1.nn.fused_batch_norm(x, scale, offset, is_training=True)
        return y, mean, variance

    args = [f(5, 3, 2, 4).astype("float16"), f(4), f(4)]
    sweep(function, args, trials=3, atol=4e-3, rtol=4e-3, partial=False)


def test_local_response_normalization():
    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.local_response_normalization(x, 2, 1.0, 0.5, 0.7)
            loss = tf.reduce_sum(y * y)
        return y, tape.gradient(loss, x)

    runs = sweep(function, [f(5, 4, 3, 6)], trials=4)
    for op_type in ("LRN", "LRNGrad"):
        assert all(was_split(runs, op_type, k) for k in "bhw")
