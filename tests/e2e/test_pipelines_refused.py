"""Pipelines that cannot be are refused before anything runs."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tests.e2e.test_mixed_precision import numbers, perceptron
from tests.e2e.test_overlap import counting, samples
from tests.e2e.test_pipelines import piped
from tests.equivalence import (
    assert_equivalent,
)
from tfpar.spec import PlanError, ScheduleError, SpecError, TfparError


def fitted(build=perceptron, mesh=(2,), constraints=(), **options) -> keras.Model:
    with tap.auto_parallel(tap.split([*mesh]), constraints, verbose=0, **options):
        model = build()
    x, y = numbers(8)
    model.fit(x, y, batch_size=8, verbose=0)
    return model


CYCLE = "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (CYCLE, "can never end, its tasks wait for each other: 0B0 needs 1B0"),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "lacks 0B1"),
        ("0F0,0B0\n2F0,2B0", "No actor runs stage 1"),
        ("0F0,0B0,1F0\n1B0", "Stage 1 is on two actors"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(schedule, message):
    given = [tap.stage("fc1", 0), tap.stage("fc2", 1)]
    with pytest.raises(ScheduleError, match=message):
        fitted(constraints=given, pipeline=tap.Pipeline(schedule=tap.Schedule.parse(schedule)))


def test_stages_that_cannot_be_are_refused():
    with pytest.raises(PlanError, match="64 stages are too many: the model has .* parts"):
        fitted(mesh=[64], **piped(64, 1))
    with pytest.raises(SpecError, match="on 2 sets of ranks; the mesh has 1"):
        fitted(mesh=[1], **piped())
    with pytest.raises(SpecError, match=r"stages have 1 \+ 2 ranks; the mesh has 4"):
        fitted(mesh=[4], pipeline=tap.Pipeline(ranks=[[0], [1, 2]], microbatches=2))
    with pytest.raises(SpecError, match="there are 2 stages, numbered from 0 to 1"):
        fitted(constraints=tap.stage("fc1", 2), **piped())
    with pytest.raises(PlanError, match="cannot be in an earlier stage"):
        fitted(constraints=[tap.stage("fc1", 1), tap.stage("fc2", 0)], **piped())
    with pytest.raises(SpecError, match="there is no pipeline of several stages"):
        fitted(constraints=tap.stage("fc1", 1))


class Doubled(keras.layers.Layer):
    """A loop of one's own, which reads no weight."""

    def call(self, x):
        return tf.while_loop(lambda i, h: i < 9, lambda i, h: (i + 1, tf.sin(h + h)), (0, x))[1]


def recurrent() -> keras.Model:
    layers = [
        keras.layers.LSTM(16, return_sequences=True),
        keras.layers.LSTM(16, return_sequences=True),
        keras.layers.Bidirectional(keras.layers.GRU(16, return_sequences=True)),
        Doubled(),
        keras.layers.RNN([keras.layers.LSTMCell(16), keras.layers.LSTMCell(16)]),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((32, 16)), *layers])
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
def test_loops_that_are_longer_than_a_stage_are_named_with_their_lines():
    batch, options = (np.zeros((64, 32, 16)), np.zeros((64, 1))), {"planner": "tap"}
    with pytest.raises(PlanError, match="512 stages are too many") as error:
        tap.plan(recurrent, batch, [512], "cpu", pipeline=tap.Pipeline(512, 1), **options)
    first = recurrent.__code__.co_firstlineno + 2
    for name, line in {
        "of LSTM '[^']*/lstm(_[0-9]+)?'": first,
        "of LSTM '[^']*/lstm_[0-9]+'": first + 1,
        "of GRU '[^']*/bidirectional[^']*/forward_gru[^']*'": first + 2,
        "of GRU '[^']*/bidirectional[^']*/backward_gru[^']*'": first + 2,
        "of Doubled '[^']*'": first + 3,
        "of RNN '[^']*'": first + 4,
    }.items():
        said = rf"/while' {name}, made in test_pipelines_refused\.py:{line} \(its part takes"
        assert re.search(said, str(error.value)), (said, str(error.value))
    assert str(error.value).endswith("(unroll=True of a Keras RNN), can be in several.")


@pytest.mark.slow
def test_an_effect_that_each_microbatch_would_have_is_refused():
    with tap.auto_parallel(tap.split([2]), verbose=0, **piped(2, 2)):
        model = counting()
    before = model.get_weights()
    x, y = samples(8)
    with pytest.raises(TfparError, match="has an effect, which each of 2 microbatches would have"):
        model.fit(x, y, batch_size=8, verbose=0)
    for value, kept in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, kept)


@pytest.mark.slow
def test_models_that_run_eagerly_run_on_one_device(caplog):
    def eager() -> keras.Model:
        model = perceptron()
        model.run_eagerly = True
        return model

    assert_equivalent(eager, numbers(8), tap.split([2]), options=piped(2, 2))
    assert "runs on one device, not on the mesh" in caplog.text
