"""Every optimizer of Keras and every option on a mesh: same updates, slots that stay split."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras.optimizers import schedules

import tfpar as tap
from tests.equivalence import assert_equivalent, op_by_op, traced

MESH = tap.split([2, 2])
COLUMN = [tap.shard("fc1/kernel", dim=1, axis="model")]
VOCABULARY, LENGTH, WIDTH, HIDDEN = 13, 5, 6, 20
rng = np.random.default_rng(0)
DATA = rng.integers(0, VOCABULARY, (12, LENGTH)).astype("int32"), rng.integers(0, 3, 12)


QUICK = {"AdamW", "Adafactor", "accumulation"}


def cases(names):
    """The names as test cases, slow but for those in QUICK."""
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


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
    specs = parallel.specs()
    assert specs["fc1/bias"] == specs["fc2/kernel"] == "R,S(0)"
    slots = {n: s for n, s in specs.items() if "fc1_kernel" in n or "fc2_kernel" in n}
    whole = [n for n, s in slots.items() if s == "R,R"]
    assert not whole, f"not split: {whole}"
    for kind, axes, size in parallel.collectives():
        if kind in ("all_gather", "all_to_all", "reduce_scatter") and "model" in axes:
            assert size < WIDTH * HIDDEN * 4, f"{kind} of {size} bytes"


O = keras.optimizers  # noqa: E741
BY_ELEMENT = {
    "SGD-momentum": lambda: O.SGD(0.1, momentum=0.9),
    "SGD-nesterov": lambda: O.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "RMSprop-centered": lambda: O.RMSprop(0.01, momentum=0.9, centered=True),
    "Adam-amsgrad": lambda: O.Adam(0.01, amsgrad=True),
    "AdamW": lambda: O.AdamW(0.01, weight_decay=0.1),
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
    "LossScale-Adam": lambda: O.LossScaleOptimizer(
        O.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=2
    ),
}


if hasattr(O, "ScheduleFreeAdamW"):
    BY_ELEMENT["ScheduleFreeAdamW"] = lambda: O.ScheduleFreeAdamW(0.01, warmup_steps=2)
# It means to keep a slot's old value, and op by op keeps the slot, which it then changes.
PLAINLY = {"ScheduleFreeAdamW": traced}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(BY_ELEMENT))
def test_optimizer(name):
    assert_slots_follow(check(BY_ELEMENT[name], plainly=PLAINLY.get(name, op_by_op)))


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


OPTIONS = {
    "accumulation": (O.Adam, dict(gradient_accumulation_steps=2)),
    "ema": (O.SGD, dict(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2)),
    "ema-at-end": (O.Adam, dict(use_ema=True, ema_momentum=0.5)),
    "clipnorm": (O.SGD, dict(clipnorm=0.05)),
    "clipvalue": (O.Adagrad, dict(clipvalue=0.002)),
    "global_clipnorm": (O.RMSprop, dict(global_clipnorm=0.05, gradient_accumulation_steps=2)),
    "weight_decay": (O.Lion, dict(weight_decay=0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(OPTIONS))
def test_option(name):
    make, options = OPTIONS[name]
    parallel = check(lambda: make(learning_rate=0.02, **options), epochs=2)
    assert_slots_follow(parallel)


@pytest.mark.slow
def test_weights_excluded_from_decay():
    def make():
        optimizer = O.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
        return optimizer

    assert_slots_follow(check(make))


SCHEDULES = {
    "cosine": lambda: schedules.CosineDecay(0.1, 5, warmup_target=0.2, warmup_steps=2),
    "exponential": lambda: schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True),
    "piecewise": lambda: schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.05, 0.2]),
    "polynomial": lambda: schedules.PolynomialDecay(0.1, 4, power=2.0, cycle=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(SCHEDULES))
def test_learning_rate_schedule(name):
    check(lambda: O.SGD(SCHEDULES[name](), momentum=0.9), epochs=2)


@pytest.mark.slow
def test_loss_scale_skips_steps_that_overflow():
    """A scale too large for float16: steps are skipped and the scale halves, as on one device."""

    def make():
        return O.LossScaleOptimizer(O.SGD(0.1), initial_scale=2.0**127)

    parallel = check(make, epochs=2)
    assert float(parallel.model.optimizer.dynamic_scale) < 2.0**127


@pytest.mark.slow
def test_slots_may_be_split_where_the_weight_is_not():
    """ZeRO-1: the batch's axis holds the slots."""
    constraints = [
        tap.batch("data"),
        *COLUMN,
        tap.shard("fc1_kernel_.*", dim=0, axis="data"),
        tap.shard("fc1_kernel_.*", dim=1, axis="model"),
    ]
    for make in (lambda: O.Adam(0.01, global_clipnorm=0.1), lambda: O.Nadam(0.01)):
        parallel, _ = assert_equivalent(
            lambda make=make: mlp(make), DATA, MESH, constraints, batch_size=4
        )
        assert {s for n, s in parallel.specs().items() if "fc1_kernel_" in n} == {"S(0),S(1)"}
