"""Batch normalisation over microbatches, against a model on one device that does the same."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.e2e.ghost import GhostBatchNormalization
from tests.e2e.test_microbatches import rounds_of
from tests.e2e.test_mixed_precision import policy
from tests.equivalence import Trained, assert_same, op_by_op, train
from tfpar.spec import ArgumentError

rng = np.random.default_rng(0)
Normalization = Callable[..., layers.Layer]


def dense(norm: Normalization) -> keras.Model:
    x = keras.Input((6,))
    # A bias right before a normalisation has no gradient but noise, which Adam would follow.
    h = keras.ops.relu(norm(name="norm0")(layers.Dense(12, "relu", name="fc0")(x)))
    h = norm(name="norm1", momentum=0.7)(layers.Dense(5, use_bias=False, name="fc1")(h))
    model = keras.Model(x, layers.Dense(3, name="fc2")(keras.ops.relu(h)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01), loss, metrics=["accuracy"], jit_compile=False)
    return model


def check(
    build: Callable[[Normalization], keras.Model],
    data: tuple[np.ndarray, ...],
    mesh: list[int],
    pipeline: tap.Pipeline,
    ranks: int | None = None,
    layer: Normalization = layers.BatchNormalization,
    with_exact: bool = False,
    **unlike: bool,
) -> Trained:
    """Train with the pipeline and on one device; weights, averages and losses have to be equal.

    Args:
        ranks: that the batch is split over; by default all.
        layer: what normalises.
        with_exact: whether to see that the statistics of whole batches give other numbers.
        unlike: how it differs from Keras's layer; see `GhostBatchNormalization`.
    """
    ranks = ranks or int(np.prod(mesh))
    micro = pipeline.order.num_microbatches

    def ghost(**kwargs) -> layers.Layer:
        return GhostBatchNormalization(ranks, micro, **unlike, **kwargs)

    plain = train(op_by_op(lambda: build(ghost)), data)
    parallel = train(
        lambda: build(layer),
        data,
        mesh=mesh,
        start=plain.start,
        options={"pipeline": pipeline},
    )
    assert_same(parallel, plain)
    if with_exact:
        exact = train(op_by_op(lambda: build(layer)), data, start=plain.start)
        assert not np.allclose(exact.losses, plain.losses, rtol=1e-3), "another model"
    return parallel


def ghosts(microbatches: int, stages: int = 1, **more) -> tap.Pipeline:
    return tap.Pipeline(stages, microbatches, batch_statistics="microbatch", **more)


def samples(n: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((n, 6)).astype("float32"), rng.integers(0, 3, n)


@pytest.mark.nightly
def test_one_rank_runs_in_one_round():
    parallel = check(dense, samples(16), [1], ghosts(4))
    assert rounds_of(parallel) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "microbatches"), [(13, 3), nightly(9, 4)])
def test_smaller_last_microbatches_have_statistics_of_their_own_samples(batch, microbatches):
    # Of 8 samples ranks have 4, cut in 2, 2 and none; the last batch has 5, or 1, which is one
    # microbatch.
    parallel = check(dense, samples(batch), [2], ghosts(microbatches), with_exact=True)
    assert rounds_of(parallel) == (1 if batch > 9 else 0)


@pytest.mark.slow
def test_two_stages_run_in_one_round():
    check(dense, samples(16), [4], ghosts(3, stages=2), ranks=2)


def images(n: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((n, 6, 6, 3)).astype("float32"), rng.integers(0, 3, n)


def convnet(norm: Normalization) -> keras.Model:
    """Residual blocks, normalised, as ResNet's; the images themselves are, too."""
    x = keras.Input((6, 6, 3))
    h = norm(name="norm")(x)
    for i, width in enumerate((4, 8)):
        skip = layers.Conv2D(width, 1, use_bias=False, name=f"skip{i}")(h)
        h = layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"conv{i}a")(h)
        h = keras.ops.relu(norm(name=f"norm{i}a")(h))
        h = layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"conv{i}b")(h)
        h = keras.ops.relu(norm(name=f"norm{i}b")(h) + norm(name=f"norm{i}s")(skip))
    h = layers.GlobalAveragePooling2D()(h)
    model = keras.Model(x, layers.Dense(3)(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, jit_compile=False)
    return model


class Fused(layers.BatchNormalization):
    """By TensorFlow's fused kernels."""

    def call(self, x, training=None):
        if not training:
            return super().call(x, training=False)
        y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
            x,
            tf.convert_to_tensor(self.gamma),
            tf.convert_to_tensor(self.beta),
            tf.convert_to_tensor(self.moving_mean),
            tf.convert_to_tensor(self.moving_variance),
            epsilon=self.epsilon,
            is_training=True,
            exponential_avg_factor=1.0 - self.momentum,
        )
        self.moving_mean.assign(mean)
        self.moving_variance.assign(variance)
        return y


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "pipeline", "batch"), [([2], ghosts(2), 13), ([2], ghosts(4, 2, schedule="zb-h1"), 16)]
)
def test_a_residual_network(mesh, pipeline, batch):
    parallel = check(
        convnet, images(batch), mesh, pipeline, ranks=mesh[0] // pipeline.order.num_actors
    )
    if pipeline.order.num_stages == 1:
        assert rounds_of(parallel) == 1


@pytest.mark.slow
def test_fused_kernels():
    check(convnet, images(8), [2], ghosts(2), layer=Fused, unbiased=True)


class Spread(layers.Layer):
    """Adds a loss that joins the batch: features are to differ from their mean."""

    def call(self, x):
        centred = x - keras.ops.mean(x, axis=0, keepdims=True)
        variance = keras.ops.mean(keras.ops.square(centred), axis=0)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.relu(1.0 - keras.ops.sqrt(variance + 1e-3))))
        return x + keras.ops.tanh(centred)


def joined(norm: Normalization) -> keras.Model:
    x = keras.Input((6,))
    h = norm(name="norm0")(layers.Dense(12, "relu", name="fc0")(x))
    h = Spread(name="spread")(layers.Dense(5, name="fc1")(h))
    model = keras.Model(x, layers.Dense(3, name="fc2")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
    model.compile(
        keras.optimizers.Adam(0.01), loss, weighted_metrics=["accuracy"], jit_compile=False
    )
    return model


@pytest.mark.slow
def test_losses_weights_and_metrics_are_those_of_the_whole_batch():
    weight = rng.uniform(0.1, 2.0, 16).astype("float32")
    check(joined, (*samples(16), weight), [2], ghosts(2))


@pytest.mark.nightly
def test_half_precision():
    data = samples(16)
    with policy("mixed_bfloat16"):
        plain = train(
            op_by_op(lambda: dense(functools.partial(GhostBatchNormalization, 2, 2))), data
        )
        parallel = train(
            lambda: dense(layers.BatchNormalization),
            data,
            mesh=[2],
            start=plain.start,
            options={"pipeline": ghosts(2)},
        )
    assert rounds_of(parallel) == 1
    np.testing.assert_allclose(parallel.losses, plain.losses, rtol=1e-2)


@pytest.mark.nightly
def test_one_microbatch_is_the_batch():
    data = samples(8)
    plain = train(op_by_op(lambda: dense(layers.BatchNormalization)), data)
    parallel = train(
        lambda: dense(layers.BatchNormalization),
        data,
        mesh=[2],
        start=plain.start,
        options={"pipeline": ghosts(1)},
    )
    assert_same(parallel, plain)
    assert "statistics" not in tap.plan_of(parallel.model).summary()


@pytest.mark.slow
def test_plans_say_that_it_is_another_model(tmp_path, caplog):
    caplog.set_level("INFO", "tfpar")
    trained = train(
        lambda: dense(layers.BatchNormalization),
        samples(8),
        mesh=[2],
        options={"pipeline": ghosts(2)},
    )
    plan = tap.plan_of(trained.model)
    said = "batch statistics of each of 2 microbatches (not of the batch: another model)"
    assert said in plan.summary()
    plan.save(tmp_path / "plan.json")
    again = tap.Plan.load(tmp_path / "plan.json")
    assert again.batch_statistics == "microbatch" and said in again.summary()
    exact = dataclasses.replace(plan, batch_statistics="exact")
    assert "batch statistics: microbatch -> exact" in plan.diff(exact)
    with pytest.raises(ArgumentError, match="batch_statistics='exact'"):
        tap.Options(plan=again, pipeline=tap.Pipeline(microbatches=2))
    resumed = train(
        lambda: dense(layers.BatchNormalization),
        samples(8),
        mesh=[2],
        options={"plan": tmp_path / "plan.json"},
    )
    assert rounds_of(resumed) == 1


def test_other_words_are_refused():
    with pytest.raises(ArgumentError, match="batch_statistics is 'ghost'; .*'microbatch'"):
        tap.Pipeline(microbatches=2, batch_statistics="ghost")
