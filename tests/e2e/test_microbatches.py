"""Gradient accumulation: a pipeline of one stage, with the numbers of the whole batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from benchmarks import models
from tests.cases import nightly
from tests.e2e.test_mixed_precision import numbers, perceptron, policy
from tests.e2e.test_overlap import classifier, counting, samples
from tests.e2e.test_patterns import MEGATRON, gpt, moe, tokens
from tests.e2e.test_recurrent import classifier as recurrent
from tests.e2e.test_recurrent import tokens as sentences
from tests.equivalence import Trained, assert_equivalent, train
from tfpar.compile.local import TASK
from tfpar.spec import ArgumentError, TfparError

rng = np.random.default_rng(0)


def accumulating(microbatches: int) -> dict[str, object]:
    return {"pipeline": tap.Pipeline(microbatches=microbatches)}


def rounds_of(trained: Trained) -> int:
    return len(trained.executable().local.graphs()) - 1


def calls_of(trained: Trained) -> int:
    return sum(op.type == TASK for op in trained.executable().local.graph.ops)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "microbatches"), [nightly([2, 2], 2), nightly([1], 4), ([2], 3)])
def test_batch_statistics_dropout_and_metrics_are_those_of_the_whole_batch(mesh, microbatches):
    # Batches of 8 and 5, of which ranks and microbatches get padded parts.
    parallel, _ = assert_equivalent(
        classifier, samples(13), tap.split(mesh), options=accumulating(microbatches)
    )
    assert rounds_of(parallel) == 4, "mean and variance, and the sums of their gradients"
    assert tap.plan_of(parallel.model).microbatches == microbatches


@pytest.mark.slow
def test_a_transformer_accumulates_in_one_round():
    def adamw() -> keras.Model:
        return gpt(optimizer=keras.optimizers.AdamW(1e-3))

    parallel, _ = assert_equivalent(
        adamw, tokens(8), tap.split([2, 2]), MEGATRON, options=accumulating(3)
    )
    assert (rounds_of(parallel), calls_of(parallel)) == (1, 3)
    body = parallel.executable().local.graphs()[1]
    reduced = [op for op in body.ops if op.type == "AllReduce"]
    assert {op.attrs["axes"] for op in reduced} == {(1,)}, "gradients meet over data once, outside"


class Regularized(layers.Layer):
    """Adds losses of its own."""

    def call(self, x):
        self.add_loss(1e-2 * keras.ops.mean(keras.ops.square(x)))
        return x


def busy() -> keras.Model:
    """Sample weights and masks, a loss of a layer, clipping by the global norm, moving averages."""
    x = keras.Input((6,))
    h = Regularized()(layers.Dense(10, "tanh", kernel_regularizer="l2")(x))
    model = keras.Model(x, layers.Dense(3)(h))
    optimizer = keras.optimizers.Adam(
        1e-2, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"], jit_compile=False)
    return model


@pytest.mark.slow
def test_weights_clipping_averages_and_added_losses():
    x, y = samples(16)
    weight = rng.uniform(0.1, 2.0, 16).astype("float32")
    parallel, _ = assert_equivalent(busy, (x, y, weight), tap.split([2]), options=accumulating(3))
    sizes = [len(body.ops) for body in parallel.executable().local.graphs()[1:]]
    assert max(sizes) == sizes[-1] > 3 * sum(sizes[:-1]), "only what is known of inputs joins"


@pytest.mark.slow
def test_an_optimizer_that_accumulates_by_itself_does_so_still():
    def build() -> keras.Model:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
        return perceptron(optimizer)

    assert_equivalent(build, numbers(32), tap.split([2]), options=accumulating(2))


@pytest.mark.nightly
def test_a_loop_over_time_runs_in_each_microbatch():
    def build() -> keras.Model:
        return recurrent(lambda: [layers.LSTM(5, use_cudnn=False)], mask=True)

    x, y, *_ = sentences()
    assert_equivalent(build, (x, y), tap.split([2]), options=accumulating(2))


@pytest.mark.slow
def test_experts_exchange_tokens_in_each_microbatch():
    x = rng.normal(size=(16, 6, 8)).astype("float32")
    y = rng.normal(size=(16, 6, 3)).astype("float32")
    experts = [tap.batch("data"), tap.shard("moe/w_(in|out)", dim=0, axis="data")]
    options = accumulating(2)
    parallel, _ = assert_equivalent(moe, (x, y), tap.split([2]), experts, options=options)
    assert rounds_of(parallel) == 1, "no exchange waits for the tokens of all microbatches"
    _, body = parallel.executable().local.graphs()
    assert "AllToAll" in {op.type for op in body.ops}


def test_what_experts_exchange_in_a_microbatch_is_priced_as_stored_of_one():
    sizes = dict(vocabulary=16, length=8, hidden=8, heads=2, num_layers=2, inner=2048, experts=4)
    ids = tf.TensorSpec((16, 8), "int32")
    experts = [tap.batch("data"), tap.shard("moe/w[io]", dim=0, axis="data")]

    def build():
        return models.compile_model(models.gshard_moe(**sizes), "adam")

    def kept_bytes(**options):
        plan = tap.plan(
            build, (ids, ids), [2], "cpu", constraints=experts, planner="tap", **options
        )
        return plan.cost.activation_bytes

    assert kept_bytes(pipeline=tap.Pipeline(microbatches=4)) < 0.3 * kept_bytes()


@pytest.mark.slow
def test_gradients_of_sharded_slots_are_scattered_once():
    slots = tap.shard(r"adam.*fc1_kernel_(momentum|velocity)", dim=0, axis="data")
    parallel, _ = assert_equivalent(
        lambda: perceptron("adam"),
        numbers(16),
        tap.split([2]),
        [tap.batch("data"), slots],
        options=accumulating(4),
    )
    main, *bodies = parallel.executable().local.graphs()
    assert any(op.type == "ReduceScatter" for op in main.ops)
    assert not any(op.type == "ReduceScatter" for body in bodies for op in body.ops)


@pytest.mark.nightly
def test_a_microbatch_that_overflows_skips_the_step():
    x, y = numbers(3 * 64)
    y[64 + 50] = 2e4  # in the second step, of the last microbatch of the second rank
    with policy("mixed_float16"):
        plain = train(perceptron, (x, y), batch_size=64)
        parts = train(
            perceptron, (x, y), batch_size=64, mesh=[2], start=plain.start, options=accumulating(4)
        )
    for run in (plain, parts):
        assert float(run.model.optimizer.dynamic_scale) == 2.0**14
        assert int(run.model.optimizer.inner_optimizer.iterations) == 2
    for got, wanted in zip(parts.weights, plain.weights, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_more_microbatches_than_samples_are_padded():
    parallel, _ = assert_equivalent(
        perceptron, numbers(6), tap.split([2]), batch_size=6, options=accumulating(5)
    )
    assert calls_of(parallel) == 5


def test_more_microbatches_than_samples_are_warned_of(caplog):
    batch = numbers(6)
    tap.plan(perceptron, batch, [1], "cpu", pipeline=tap.Pipeline(microbatches=6), planner="tap")
    assert not caplog.records
    tap.plan(perceptron, batch, [1], "cpu", pipeline=tap.Pipeline(microbatches=8), planner="tap")
    assert "8 microbatches: 2 of them are all padding" in caplog.text


@pytest.mark.slow
def test_evaluation_and_prediction_run_in_one_piece():
    parallel, plain = assert_equivalent(
        perceptron, numbers(16), tap.split([2]), options=accumulating(2)
    )
    x, y = numbers(16)
    np.testing.assert_allclose(parallel.model.predict(x, verbose=0), plain.model(x), 1e-4, 1e-5)
    parallel.model.evaluate(x, y, verbose=0)
    assert not any(op.type == TASK for op in parallel.executable("test").local.graph.ops)


def test_an_effect_that_each_microbatch_would_have_is_an_error():
    with tap.auto_parallel([2], planner=None, **accumulating(2)):
        model = counting()
    with pytest.raises(TfparError, match="counting.*has an effect, which each of 2 microbatches"):
        model.fit(*samples(8), verbose=0)


@pytest.mark.nightly
def test_a_searched_plan_is_priced_in_its_microbatches():
    def price(microbatches: int | None) -> tap.Plan:
        pipeline = microbatches and tap.Pipeline(microbatches=microbatches)
        return tap.plan(*(gpt, tokens(8), [2], "v100-ethernet"), pipeline=pipeline, planner="tap")

    plan = price(4)
    whole, cut = price(None).cost, plan.cost
    assert whole is not None and cut is not None
    assert cut.memory_bytes < whole.memory_bytes
    assert cut.activation_bytes == pytest.approx(whole.activation_bytes / 4)
    assert "in 4 microbatches" in plan.summary()


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (4, "tap.Pipeline"),
        (tap.Pipeline(microbatches=2, recompute=True), "recompute="),
    ],
)
def test_what_cannot_be_run_is_said(pipeline, message):
    with pytest.raises(ArgumentError, match=message):
        tap.Options(pipeline=pipeline)


def test_chunks_and_microbatches_exclude_each_other():
    with pytest.raises(ArgumentError, match="chunks or a pipeline"):
        tap.Options(pipeline=tap.Pipeline(microbatches=2), chunks=2)


@pytest.mark.slow
def test_one_stage_and_one_microbatch_are_no_pipeline():
    programs = []
    for options in ({}, accumulating(1)):
        keras.backend.clear_session()
        trained = train(perceptron, numbers(8), mesh=[2], options=options)
        programs.append(str(trained.executable().local))
    assert programs[0] == programs[1]
