"""Recurrent models and grouped convolutions train on a mesh as on one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.equivalence import assert_equivalent

LENGTH, VOCABULARY, UNITS, BATCH = 5, 11, 6, 8
rng = np.random.default_rng(0)


def tokens(n=BATCH):
    x = rng.integers(1, VOCABULARY, (n, LENGTH)).astype("int32")
    x[::3, 3:] = 0
    return x, rng.integers(0, 4, n)


def classifier(make, mask=False):
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, UNITS, mask_zero=mask)(ids)
    for layer in make():
        x = layer(x)
    model = keras.Model(ids, layers.Dense(4)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
    return model


RECURRENT = {
    "lstm": lambda: [layers.LSTM(UNITS, use_cudnn=False)],
    "gru": lambda: [layers.GRU(UNITS, use_cudnn=False)],
    "simple": lambda: [layers.SimpleRNN(UNITS)],
    "stacked": lambda: [
        layers.LSTM(UNITS, return_sequences=True, use_cudnn=False),
        layers.GRU(UNITS, go_backwards=True, use_cudnn=False),
    ],
    "bidirectional": lambda: [layers.Bidirectional(layers.LSTM(UNITS, use_cudnn=False))],
    "cells": lambda: [layers.RNN([layers.LSTMCell(UNITS), layers.GRUCell(UNITS)])],
    "time distributed": lambda: [
        layers.TimeDistributed(layers.Dense(UNITS)),
        layers.GlobalAveragePooling1D(),
    ],
}


MASKED = ("lstm", "bidirectional", "cells")
"""One masked layer of a kind is enough."""
BY_DEFAULT = (("stacked", False), ("bidirectional", True), ("time distributed", False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        case if case in BY_DEFAULT else nightly(*case)
        for case in (*((name, False) for name in RECURRENT), *((name, True) for name in MASKED))
    ],
)
def test_recurrent_layers_are_data_parallel(name, mask):
    parallel, _ = assert_equivalent(
        lambda: classifier(RECURRENT[name], mask), tokens(), tap.split([2]), batch_size=BATCH
    )
    assert not parallel.executable().partitioned.replicated_regions
    assert not parallel.exchanged()


@pytest.mark.slow
def test_weights_of_a_recurrent_layer_split():
    constraints = [
        tap.batch("data"),
        tap.shard("lstm/lstm_cell/kernel", dim=0, axis="data"),
        tap.shard("lstm/lstm_cell/recurrent_kernel", dim=1, axis="model"),
    ]
    parallel, _ = assert_equivalent(
        lambda: classifier(lambda: [layers.LSTM(UNITS, use_cudnn=False, name="lstm")]),
        tokens(BATCH + 3),
        tap.split([2, 2]),
        constraints,
        batch_size=BATCH,
    )
    regions = parallel.executable().partitioned.replicated_regions
    assert not [axis for _, axis in regions if axis == 0]


@pytest.mark.slow
def test_grouped_convolution_is_data_parallel():
    def build():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 4)),
                layers.Conv2D(6, 3, groups=2),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        return model

    data = rng.normal(size=(BATCH * 2, 8, 8, 4)), rng.normal(size=(BATCH * 2, 3))
    parallel, _ = assert_equivalent(build, data, tap.split([2]), batch_size=BATCH)
    assert not parallel.executable().partitioned.replicated_regions
    assert not parallel.exchanged()


def test_a_loop_that_runs_whole_is_reported(caplog):
    class Normalise(layers.Layer):
        """Divides by the norm of the whole batch, again and again."""

        def call(self, x):
            return keras.ops.fori_loop(
                0, 3, lambda _, x: x / keras.ops.sqrt(keras.ops.sum(x * x)), x
            )

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4), Normalise()])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        return model

    data = rng.normal(size=(BATCH, 6)), rng.normal(size=(BATCH, 4))
    parallel, _ = assert_equivalent(build, data, tap.split([2]), batch_size=BATCH)
    assert "need collectives run whole" in caplog.text
    plan = tap.plan_of(parallel.model)
    assert "run whole along an axis" in plan.summary(full=True)
    assert "2 loops and calls run whole" in plan.summary()
