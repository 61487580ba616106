"""Every optimizer of Keras and every option on a mesh: same updates, slots that stay split."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from keras.optimizers import schedules

import tfpar as tap
from tests.equivalence import assert_equivalent, traced

MESH = tap.split([2, 2])
COLUMN = [tap.shard("fc1/kernel", dim=1, axis="model")]
VOCABULARY, LENGTH, WIDTH, HIDDEN = 13, 5, 6, 24
rng = np.random.default_rng(0)
DATA = rng.integers(0, VOCABULARY, (12, LENGTH)).astype("int32"), rng.integers(0, 3, 12)


def mlp(optimizer) -> keras.Model:
    """Embedding, a column and a row split with biases, a layer norm on the split dim."""
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="tokens")(ids)
    x = layers.Dense(HIDDEN, "tanh", name="fc1")(x)
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.Dense(WIDTH, "tanh", name="fc2")(x)
    x = layers.Dense(3, name="head")(ops.mean(x, axis=1))
    model = keras.Model(ids, x)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer() if callable(optimizer) else optimizer, loss, jit_compile=False)
    return model


def check(optimizer, **arguments):
    arguments = {"batch_size": 4, **arguments}
    parallel, _ = assert_equivalent(lambda: mlp(optimizer), DATA, MESH, COLUMN, **arguments)
    return parallel


def assert_slots_follow(parallel) -> None:
    """Weights and slots of the split layers are split; none of them is gathered."""
    slots = {n: s for n, s in parallel.specs().items() if "fc1_kernel" in n or "fc2_kernel" in n}
    whole = [n for n, s in slots.items() if s == "R,R"]
    assert not whole, f"not split: {whole}"
    for kind, axes, size in parallel.collectives():
        if kind in ("all_gather", "all_to_all", "reduce_scatter") and "model" in axes:
            assert size < WIDTH * HIDDEN * 4, f"{kind} of {size} bytes"


O = keras.optimizers  # noqa: E741
OPTIMIZERS = {
    "SGD-momentum": lambda: O.SGD(0.1, momentum=0.9),
    "SGD-nesterov": lambda: O.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "RMSprop-centered": lambda: O.RMSprop(0.01, momentum=0.9, centered=True),
    "Adam-amsgrad": lambda: O.Adam(0.01, amsgrad=True),
    "AdamW": lambda: O.AdamW(0.01, weight_decay=0.1),
    "AdamW-excluded": lambda: without_decay_of_tables(O.AdamW(0.01, weight_decay=0.5)),
    "Adamax": lambda: O.Adamax(0.01),
    "Nadam": lambda: O.Nadam(0.01),
    "Adagrad": lambda: O.Adagrad(0.1),
    "Adadelta": lambda: O.Adadelta(1.0),
    "Adafactor": lambda: O.Adafactor(0.1),
    "Adafactor-decay": lambda: O.Adafactor(0.1, relative_step=False, weight_decay=0.01),
    "Ftrl": lambda: O.Ftrl(
        0.1, l1_regularization_strength=1e-3, l2_shrinkage_regularization_strength=1e-3
    ),
    "Lion": lambda: O.Lion(1e-3, weight_decay=0.1),
    "Lamb": lambda: O.Lamb(0.01),
    "accumulation": lambda: O.Adam(0.02, gradient_accumulation_steps=2),
    "ema": lambda: O.SGD(0.02, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "clipnorm": lambda: O.SGD(0.02, clipnorm=0.05),
    "clipvalue": lambda: O.Adagrad(0.02, clipvalue=0.002),
    "global_clipnorm": lambda: O.RMSprop(0.02, global_clipnorm=0.05, gradient_accumulation_steps=2),
    "cosine": lambda: O.SGD(
        schedules.CosineDecay(0.1, 5, warmup_target=0.2, warmup_steps=2), momentum=0.9
    ),
    "exponential": lambda: O.SGD(schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)),
    "piecewise": lambda: O.SGD(schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.05, 0.2])),
    "polynomial": lambda: O.SGD(schedules.PolynomialDecay(0.1, 4, power=2.0, cycle=True)),
}


def without_decay_of_tables(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    optimizer.exclude_from_weight_decay(var_names=["embeddings"])
    return optimizer


class Branches(keras.Model):
    """A table and a kernel split by columns for each optimizer; what comes of them is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = [self._branch(name) for name in OPTIMIZERS]

    def _branch(self, name: str) -> keras.Model:
        ids = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(VOCABULARY, WIDTH, name=f"{name}-tokens")(ids)
        x = layers.Dense(HIDDEN, "tanh", use_bias=False, name=f"{name}-fc1")(x)
        return keras.Model(ids, ops.sum(layers.Reshape((LENGTH, -1, 3))(x), axis=2))

    def compile(self, **arguments) -> None:
        super().compile(**arguments)
        self.optimizers = [make() for make in OPTIMIZERS.values()]

    def call(self, ids):
        return ops.mean(sum(branch(ids) for branch in self.branches), axis=1)

    def train_step(self, data):
        ids, labels = data
        weights = [branch.trainable_variables for branch in self.branches]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(ids, labels, self(ids, training=True))
        for optimizer, its, gradients in zip(
            self.optimizers, weights, tape.gradient(loss, weights), strict=True
        ):
            optimizer.apply(gradients, its)
        return {"loss": loss}


@pytest.mark.slow
def test_every_optimizer_and_option_in_one_step():
    def build() -> keras.Model:
        model = Branches()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(loss=loss, jit_compile=False)
        model.build((None, LENGTH))
        return model

    columns = [tap.shard(".*-fc1/kernel", dim=1, axis="model")]
    parallel, _ = assert_equivalent(build, DATA, MESH, columns, batch_size=6, epochs=2)
    assert_slots_follow(parallel)


@pytest.mark.slow
def test_a_network_whose_slots_are_split():
    parallel = check(OPTIMIZERS["AdamW"])
    assert parallel.specs()["fc1/bias"] == parallel.specs()["fc2/kernel"] == "R,S(0)"
    assert_slots_follow(parallel)


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(O, "ScheduleFreeAdamW"), reason="this Keras has no such optimizer")
def test_an_optimizer_without_schedules():
    """Traced: it means to keep a slot's old value, and op by op keeps what it then changes."""
    assert_slots_follow(check(lambda: O.ScheduleFreeAdamW(0.01, warmup_steps=2), plainly=traced))


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 13),
    reason="Keras has no Muon, or one that fails by itself on TensorFlow",
)
def test_muon():
    """Its update multiplies whole weights with each other: a split one is reduced or gathered."""
    check(lambda: O.Muon(0.01))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(O, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
def test_optimizers_by_layer():
    def make():
        return O.MultiOptimizer(O.OptimizerMap(O.SGD(0.1), {"fc1/.*": O.Adam(0.01)}))

    check(make)


@pytest.mark.slow
def test_averages_of_weights_that_a_model_gets_at_the_end():
    parallel = check(lambda: O.Adam(0.02, use_ema=True, ema_momentum=0.5), epochs=2)
    assert_slots_follow(parallel)


@pytest.mark.slow
def test_loss_scale_skips_steps_that_overflow_and_grows_again():
    """A scale too large for float16: steps are skipped and the scale halves, as on one device."""

    def make():
        return O.LossScaleOptimizer(O.Adam(0.01), initial_scale=2.0**127, dynamic_growth_steps=2)

    parallel, plain = assert_equivalent(
        lambda: mlp(make), DATA, MESH, COLUMN, batch_size=4, epochs=2
    )
    scales = [float(run.model.optimizer.dynamic_scale) for run in (parallel, plain)]
    assert scales[0] == scales[1] < 2.0**127
    assert_slots_follow(parallel)


@pytest.mark.slow
def test_slots_may_be_split_where_the_weight_is_not():
    """ZeRO-1: the batch's axis holds the slots."""
    constraints = [
        tap.batch("data"),
        *COLUMN,
        tap.shard("fc1_kernel_.*", dim=0, axis="data"),
        tap.shard("fc1_kernel_.*", dim=1, axis="model"),
    ]
    parallel, _ = assert_equivalent(
        lambda: mlp(lambda: O.Nadam(0.01, global_clipnorm=0.1)),
        DATA,
        MESH,
        constraints,
        batch_size=4,
    )
    assert {s for n, s in parallel.specs().items() if "fc1_kernel_" in n} == {"S(0),S(1)"}
