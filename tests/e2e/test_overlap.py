"""Chunks of the batch and early collectives: another order of work, the same numbers."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.e2e.test_patterns import MEGATRON, gpt, moe, tokens
from tests.equivalence import Trained, assert_equivalent, train
from tfpar.spec import TfparError
from tfpar.tf.keras import parallel_model

COLUMNS = [tap.batch("data"), tap.shard("fc1/kernel", dim=1, axis="model")]


def classifier() -> keras.Model:
    inputs = keras.Input((6,))
    h = layers.Dense(12, "relu", name="fc1")(inputs)
    h = layers.BatchNormalization(name="norm")(h)
    h = layers.Dropout(0.3, seed=3, name="dropout")(h)
    model = keras.Model(inputs, layers.Dense(3, name="fc2")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(0.01)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def samples(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, 6)).astype("float32"), rng.integers(0, 3, n)


def sent(trained: Trained) -> dict[str, list[int]]:
    """Bytes of each collective that is emitted, by type."""
    found: dict[str, list[int]] = {}
    for op in trained.executable().local.graph.ops:
        if op.type in ("AllReduce", "ReduceScatter", "AllToAll"):
            found.setdefault(op.type, []).append(sum(t.num_bytes for t in op.inputs))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "constraints", "chunks"),
    [nightly([2], [], 2), nightly({"data": 1, "model": 2}, COLUMNS, 4), ([2, 2], COLUMNS, 2)],
    ids=["data", "model", "both"],
)
def test_dropout_normalization_and_metrics_are_those_of_the_whole_batch(mesh, constraints, chunks):
    # Batches of 8 and 5, of which ranks and chunks get padded parts.
    assert_equivalent(
        classifier, samples(13), tap.split(mesh), constraints, options={"chunks": chunks}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "chunks"), [([1, 2], 2), nightly([2, 2], 4)])
def test_each_chunk_of_a_transformer_has_its_own_all_reduces(mesh, chunks):
    def adamw() -> keras.Model:
        return gpt(optimizer=keras.optimizers.AdamW(1e-3))

    parallel, _ = assert_equivalent(
        adamw, tokens(8), tap.split(mesh), MEGATRON, options={"chunks": chunks}
    )
    whole = parallel.executable()
    per_chunk = 8 // mesh[0] // chunks * 12 * 16 * 4
    activations = [n for n in sent(parallel)["AllReduce"] if n == per_chunk]
    assert len(activations) == 4 * chunks, "two forward, two backward"
    assert whole.partitioned.mesh == tap.split(mesh)


@pytest.mark.slow
def test_gradients_are_scattered_once():
    slots = tap.shard(r"adam.*fc1_kernel_(momentum|velocity)", dim=0, axis="data")
    zero = [tap.batch("data"), slots]
    chunked, _ = assert_equivalent(
        classifier, samples(8), tap.split([2]), zero, options={"chunks": 2}
    )
    whole = train(classifier, samples(8), mesh=tap.split([2]), constraints=zero)
    assert sent(chunked)["ReduceScatter"] == sent(whole)["ReduceScatter"]
    assert sum(sent(chunked)["AllReduce"]) == sum(sent(whole)["AllReduce"])


@pytest.mark.slow
def test_experts_exchange_the_samples_of_each_chunk():
    rng = np.random.default_rng(0)
    data = rng.standard_normal((8, 6, 8)), rng.standard_normal((8, 6, 3))
    experts = [tap.batch("data"), tap.shard("moe/w_.*", dim=0, axis="data")]
    assert_equivalent(moe, data, tap.split([2]), experts, options={"chunks": 2})


@pytest.mark.nightly
def test_gradients_in_half_precision_are_summed_in_full_over_chunks():
    parallel, _ = assert_equivalent(
        classifier,
        samples(8),
        tap.split([2]),
        rtol=1e-2,
        loss_rtol=1e-3,
        options={"chunks": 2, "compression": "fp16"},
    )
    sums = [op for op in parallel.executable().local.graph.ops if op.type == "AddN"]
    assert sums and not any(op.outputs[0].dtype == "half" for op in sums)


def residual() -> keras.Model:
    inputs = keras.Input((6,))
    x = layers.Dense(6, name="fc0")(inputs)
    h = layers.LayerNormalization(name="norm")(x)
    h = layers.Dense(24, "tanh", name="fc1")(h)
    x = x + layers.Dense(6, name="fc2")(h)
    model = keras.Model(inputs, layers.Dense(3, name="fc3")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, nightly(False)])
def test_early_collectives_can_be_switched_off(early):
    parallel, _ = assert_equivalent(
        residual,
        samples(8),
        tap.split({"data": 1, "model": 2}),
        COLUMNS,
        options={"early_collectives": early},
    )
    ops = {op.name: op for op in parallel.executable().local.graph.ops}
    (weights,) = (op for n, op in ops.items() if "fc1" in n and n.endswith("MatMul/MatMul_1"))
    assert [op.name for op in weights.control] == [weights.name.removesuffix("_1")] * early


# --- plans ------------------------------------------------------------------------


def fitted(**options) -> keras.Model:
    with tap.auto_parallel([2], planner=None, **options):
        model = classifier()
    model.fit(*samples(8), verbose=0)
    return model


@pytest.mark.slow
def test_evaluation_and_prediction_are_not_chunked():
    model = fitted(chunks=2)
    model.evaluate(*samples(8), verbose=0)
    steps = parallel_model(model).executables
    choose_num_chunks = {
        kind: any(op.name.endswith("/chunk1") for op in step.local.graph.ops)
        for kind, step in steps.items()
    }
    assert choose_num_chunks == {"train": True, "test": False}


@pytest.mark.slow
def test_a_plan_keeps_its_chunks_and_the_argument_wins(tmp_path):
    plan = tap.plan_of(fitted(chunks=2))
    assert plan.chunks == 2 and "2 chunks" in plan.summary()
    plan.save(tmp_path / "plan.json")
    keras.utils.clear_session(free_memory=False)
    assert tap.plan_of(fitted(plan=str(tmp_path / "plan.json"))).chunks == 2
    keras.utils.clear_session(free_memory=False)
    assert tap.plan_of(fitted(plan=str(tmp_path / "plan.json"), chunks=1)).chunks == 1


def test_an_impossible_number_of_chunks_says_which_there_are():
    with pytest.raises(TfparError, match="chunks is 3; it must be one of 1, 2, 4"):
        tap.auto_parallel([2], chunks=3)


# --- effects ----------------------------------------------------------------------


class Counting(layers.Layer):
    """Counts the rounds of a loop over its inputs."""

    def build(self, shape):
        self.rounds = self.add_weight(shape=(), name="rounds", trainable=False)

    def call(self, x):
        def body(i, h):
            self.rounds.assign_add(1.0)
            return i + 1, tf.tanh(h + x)

        return tf.while_loop(lambda i, h: i < 3, body, (0, x))[1]


def counting() -> keras.Model:
    inputs = keras.Input((6,))
    h = Counting(name="counting")(layers.Dense(6, name="fc1")(inputs))
    model = keras.Model(inputs, layers.Dense(3, name="fc2")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    return model


@pytest.mark.slow
def test_a_loop_with_an_effect_keeps_the_batch_whole(caplog):
    with caplog.at_level(logging.WARNING, "tfpar"):
        parallel, _ = assert_equivalent(counting, samples(8), tap.split([2]), options={"chunks": 2})
    told = [r.message for r in caplog.records if "which 2 chunks would each have" in r.message]
    assert len(told) == 1 and "counting" in told[0]
    assert tap.plan_of(parallel.model).chunks == 1


def test_a_loop_with_an_effect_is_an_error_if_strict():
    with tap.auto_parallel([2], planner=None, chunks=2, strict=True):
        model = counting()
    with pytest.raises(TfparError, match="counting.* has an effect, .* Leave out chunks="):
        model.fit(*samples(8), verbose=0)
