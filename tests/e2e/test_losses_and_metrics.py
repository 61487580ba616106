"""Inputs, outputs, losses and metrics, against one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.e2e.features import compiled, f, i, same
from tests.equivalence import traced


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.mean(ops.square(x)))
        return x


def several_heads():
    wide, ids = keras.Input((6,), name="wide"), keras.Input((3,), dtype="int32", name="ids")
    embedded = layers.Embedding(7, 4, embeddings_regularizer="l2", name="table")(ids)
    x = layers.Concatenate()([wide, layers.Flatten()(embedded)])
    x = layers.Dense(
        10,
        "tanh",
        kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-2),
        activity_regularizer="l2",
        name="fc1",
    )(x)
    x = Penalty()(x)
    outputs = {
        "label": layers.Dense(3, "softmax", name="label")(x),
        "size": layers.Dense(1, name="size")(x),
    }
    return compiled(
        {"wide": wide, "ids": ids},
        outputs,
        loss={"label": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"label": 1.0, "size": 0.3},
        metrics={"label": ["accuracy"], "size": ["mae"]},
        weighted_metrics={"size": ["mse"]},
    )


@pytest.mark.slow
def test_several_inputs_outputs_losses_weights_and_regularizers():
    x = {"wide": f(12, 6), "ids": i(7, 12, 3)}
    y = {"label": i(3, 12), "size": f(12, 1)}
    weights = {"label": np.abs(f(12)), "size": np.abs(f(12))}
    parallel, plain = same(
        several_heads, (x, y, weights), epochs=2, validation_split=1 / 3, plainly=traced
    )
    for kind in ("evaluate", "predict"):
        arguments = (x, y) if kind == "evaluate" else (x,)
        got = getattr(parallel.model, kind)(*arguments, batch_size=5, verbose=0)
        want = getattr(plain.model, kind)(*arguments, batch_size=5, verbose=0)
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), got, want)


LOSSES = [
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy",
    "CategoricalHinge",
    "CosineSimilarity",
    "Dice",
    "Hinge",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "SquaredHinge",
    "Tversky",
]


@pytest.mark.slow
def test_losses():
    """All in one model, each with an output of its own, reduced in turn in every way."""
    reductions = ["sum_over_batch_size", "sum", "mean_with_sample_weight"]
    losses = [getattr(keras.losses, n) for n in LOSSES if hasattr(keras.losses, n)]

    def build():
        x = keras.Input((6,))
        h = layers.Dense(10, "tanh", name="fc1")(x)
        heads = [layers.Dense(4, "softmax", name=f"out{n}")(h) for n in range(len(losses))]
        loss = [make(reduction=reductions[n % 3]) for n, make in enumerate(losses)]
        return compiled(x, heads, loss=loss)

    y = np.eye(4, dtype="float32")[i(4, 8)]
    weights = [np.abs(f(8)) + 0.1 for _ in losses]
    same(build, (f(8, 6), [y] * len(losses), weights), rtol=5e-3, plainly=traced)


@pytest.mark.slow
def test_losses_over_pairs_and_sequences():
    """Circle loss compares samples with each other; CTC loops over time."""

    def build():
        x = keras.Input((5, 6))
        h = layers.Dense(10, "tanh", name="fc1")(x)
        outputs = [
            layers.UnitNormalization(name="a")(layers.Flatten()(h)),
            layers.Dense(4, name="b")(h),
        ]
        return compiled(x, outputs, loss=[keras.losses.Circle(), keras.losses.CTC()])

    same(build, (f(8, 5, 6), [i(3, 8), i(3, 8, 2) + 1]), rtol=5e-3)


def metrics_of_scores():
    m = keras.metrics
    return [
        m.AUC(20),
        m.AUC(10, curve="PR", multi_label=True),
        m.Precision(),
        m.Recall(class_id=1),
        m.TruePositives(),
        m.FalseNegatives([0.3, 0.6]),
        m.BinaryAccuracy(),
        m.BinaryIoU(),
        m.CategoricalAccuracy(),
        m.TopKCategoricalAccuracy(2),
        m.F1Score("macro"),
        m.FBetaScore("weighted", beta=2.0),
        m.CosineSimilarity(),
        m.KLDivergence(),
        m.CategoricalHinge(),
        m.R2Score(),
        m.OneHotMeanIoU(4),
        m.PrecisionAtRecall(0.5, 10),
        m.SensitivityAtSpecificity(0.5, 10),
        m.RootMeanSquaredError(),
        m.LogCoshError(),
        m.Poisson(),
        m.MeanAbsolutePercentageError(),
        m.PearsonCorrelation(),
        m.ConcordanceCorrelation(),
    ]


def metrics_of_logits():
    m = keras.metrics
    return [
        m.SparseCategoricalAccuracy(),
        m.SparseTopKCategoricalAccuracy(2),
        m.SparseCategoricalCrossentropy(from_logits=True),
        m.MeanIoU(4, sparse_y_pred=False),
    ]


@pytest.mark.slow
def test_metrics():
    def build():
        x = keras.Input((6,))
        h = layers.Dense(10, "tanh", name="fc1")(x)
        heads = [layers.Dense(4, "softmax", name="a")(h), layers.Dense(4, name="b")(h)]
        metrics = [metrics_of_scores(), metrics_of_logits()]
        for n, metric in enumerate(sum(metrics, [])):
            metric.name = f"m{n}"  # Keras numbers names anew for each model
        losses = [
            "categorical_crossentropy",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ]
        return compiled(x, heads, loss=losses, metrics=metrics)

    y = i(4, 8)
    same(build, (f(8, 6), [np.eye(4, dtype="float32")[y], y]), plainly=traced)
