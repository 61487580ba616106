"""`verify` on small models: right ones pass in any precision, wrong ones do not."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers import Adam, LossScaleOptimizer

import tfpar as tap
from tests.e2e.test_mixed_precision import policy
from tests.equivalence import without_graph_optimizers
from tests.observability.verification.planted import drops_sums, runs_as
from tests.observability.verification.test_planted_errors import planted_rule
from tfpar.observability.verification import Verdict, Verification

SAMPLES, WIDTH, CLASSES = 16, 12, 5
POLICIES = ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16"]
COLUMNS = [tap.shard("fc1/kernel", dim=1, axis="model")]

rng = np.random.default_rng(0)
X = rng.normal(size=(SAMPLES, WIDTH)).astype("float32")
Y = rng.integers(0, CLASSES, SAMPLES)


def compiled(inputs, outputs, optimizer="adam") -> keras.Model:
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def perceptron(optimizer="adam") -> keras.Model:
    inputs = keras.Input((WIDTH,))
    h = layers.Dense(32, "relu", name="fc1")(inputs)
    h = layers.Dropout(0.2, seed=3)(layers.BatchNormalization(name="norm")(h))
    return compiled(inputs, layers.Dense(CLASSES, name="head")(h), optimizer)


def parallel(build=perceptron, constraints=COLUMNS, mesh=(2, 2)) -> keras.Model:
    keras.utils.set_random_seed(0)
    with tap.auto_parallel(list(mesh), constraints, planner=None):
        return build()


def verified(model: keras.Model, x=X, y=Y, **arguments) -> Verification:
    with without_graph_optimizers():
        return tap.verify(model, x, y, **{"steps": 1, **arguments})


def differing(report: Verification) -> set[str]:
    return {v.name for v in report.variables if v.verdict is Verdict.DIFFERS}


# --- precision --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_right_model_passes_and_a_wrong_one_does_not(name):
    """Under Adam, which makes a whole step of any gradient."""
    with policy(name):
        model = parallel()
        report = verified(model, steps=2)
        assert report.ok, str(report)
        told = [v for v in report.variables if v.gradient is not None]
        assert len(told) == 6
        # Before batch normalization a bias has no gradient but roundings.
        assert {v.name for v in told if v.gradient.noise > 0.1} <= {"fc1/bias"}, str(report)
        with planted_rule("BiasAddGrad", drops_sums):
            assert {"head/bias"} <= differing(verified(parallel()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ("sgd", "mixed_bfloat16"),
        ("adamw", "mixed_float16"),
        ("lion", "bfloat16"),
        ("adamax", "mixed_bfloat16"),
        ("adafactor", "float32"),
        ("lion", "mixed_float16"),
    ],
)
def test_no_optimizer_makes_a_difference_of_roundings(optimizer, name):
    with policy(name):
        report = verified(parallel(lambda: perceptron(optimizer)))
        assert report.ok, str(report)


@pytest.mark.slow
def test_compressed_gradients_pass():
    keras.utils.set_random_seed(0)
    with tap.auto_parallel([2], planner=None, compression="fp16"):
        model = perceptron()
    report = verified(model)
    assert report.ok, str(report)
    assert max(v.gradient.error for v in report.variables if v.gradient is not None) > 1e-5


# --- what is compared -------------------------------------------------------------------


class Counting(layers.Layer):
    """State of every kind, none of it trained."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.raw = tf.Variable(tf.zeros(WIDTH), trainable=False, name="raw")  # unknown to Keras
        self.draws = tf.random.Generator.from_seed(1)
        self.seeds = keras.random.SeedGenerator(2)

    def build(self, shape):
        self.seen = self.add_weight((), "zeros", dtype="int64", trainable=False, name="seen")

    def call(self, x):
        self.seen.assign(self.seen + tf.math.count_nonzero(x > 0))
        self.raw.assign_add(tf.reduce_sum(x, 0))
        return x + 0.1 * keras.random.normal((WIDTH,), seed=self.seeds)


def counting() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    h = layers.Dense(32, "relu", name="fc1")(Counting(name="count")(inputs))
    h = layers.BatchNormalization(name="norm")(h)
    return compiled(inputs, layers.Dense(CLASSES, name="head")(h))


@pytest.mark.slow
def test_every_variable_is_compared_and_put_back():
    model = parallel(counting)
    model.fit(X, Y, batch_size=8, verbose=0)
    layer = model.get_layer("count")
    held = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = [v.numpy() for v in (*held, layer.raw)]
    report = verified(model)
    assert report.ok, str(report)
    names = [v.name for v in report.variables]
    assert len(set(names)) == len(names)
    assert {v.path for v in held} <= set(names)
    assert any("raw" in n for n in names)
    assert {o.name for o in report.outputs} == {"loss", "accuracy"}
    for got, want in zip((*held, layer.raw), before, strict=True):
        np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.slow
def test_an_error_that_reaches_only_a_counter_is_found():
    with planted_rule("Sum", drops_sums):
        found = differing(verified(parallel(counting)))
    assert "count/seen" in found


def test_updates_are_compared_by_themselves():
    """Gradients are right; what the optimizer makes of them is not."""

    def clipped():
        return perceptron(keras.optimizers.SGD(0.1, global_clipnorm=0.01))

    with planted_rule("Sum", drops_sums, only=lambda op: op.name.startswith("sgd")):
        report = verified(parallel(clipped))
    gradients = {v.gradient.verdict for v in report.variables if v.gradient is not None}
    weights = {v.update.verdict for v in report.variables if v.name.endswith("kernel")}
    assert Verdict.DIFFERS not in gradients and Verdict.DIFFERS in weights, str(report)


def _subtracts_twice(local):
    handle, value = local.inputs
    return local.copy([handle, local.build.binary("AddV2", value, value)]).outputs


@pytest.mark.slow
def test_wrong_updates_in_float16_are_found():
    """Adam there takes differences of decays that are nearly one: no noise comes of that."""
    with policy("float16"), planted_rule("AssignSubVariableOp", runs_as(_subtracts_twice)):
        report = verified(parallel())
    assert "fc1/kernel" in differing(report), str(report)


@pytest.mark.slow
def test_steps_that_a_loss_scale_skips_are_taken_again():
    def scaled():
        return perceptron(LossScaleOptimizer(Adam(), initial_scale=2.0**20))

    with policy("mixed_float16"):
        report = verified(parallel(scaled))
        assert report.ok and report.skipped, str(report)
        assert len(report.losses) == len(report.skipped) + 1
        assert "step 0: " in str(report) and "(skipped: gradients are not finite)" in str(report)
        with planted_rule("BiasAddGrad", drops_sums):
            assert "head/bias" in differing(verified(parallel(scaled)))


@pytest.mark.slow
def test_nothing_is_right_that_is_not_finite():
    model = parallel()
    model.get_layer("head").bias.assign([np.nan] * CLASSES)
    report = verified(model)
    assert not report.ok and not differing(report)
    assert report.not_judged["loss"] is Verdict.NOT_FINITE
    assert report.not_judged["fc1/kernel"] is Verdict.NOT_FINITE
    assert "not finite: not judged: " in str(report)
    told = json.loads(report.to_json())
    assert {"name": "loss", "verdict": "not finite"} in told["not_judged"]
    assert told["skipped"] == [0] and told["equal"] is False


def test_sparse_gradients_are_compared():
    def lookup():
        ids = keras.Input((4,), dtype="int32")
        h = layers.GlobalAveragePooling1D()(layers.Embedding(20, WIDTH, name="table")(ids))
        return compiled(ids, layers.Dense(CLASSES, name="head")(h))

    ids = rng.integers(0, 6, (SAMPLES, 4))
    rows = [tap.shard("table/embeddings", dim=0, axis="model")]
    report = verified(parallel(lookup, rows), ids)
    assert report.ok, str(report)
    (table,) = (v for v in report.variables if v.name == "table/embeddings")
    assert table.gradient is not None and 0 < table.gradient.noise < 1e-5


def test_a_long_sum_in_16_bits_is_nobody_s_error():
    """The gradient of a bias adds up what many positions say alike: one device's sum stands still
    long before those of the ranks do."""

    def dense():
        inputs = keras.Input((2048, 2))
        return compiled(inputs, layers.Dense(2, name="head")(inputs))

    x, y = np.ones((4, 2048, 2), "float32"), np.zeros((4, 2048), "int32")
    with policy("bfloat16"):
        report = verified(parallel(dense, (), (2,)), x, y)
    assert report.ok, str(report)
    (bias,) = (v for v in report.variables if v.name == "head/bias")
    assert bias.gradient is not None and bias.gradient.error > 0.1


@pytest.mark.slow
def test_the_mesh_goes_on_from_its_own_state():
    report = verified(parallel(mesh=(2,), constraints=()), steps=3, batch_size=6)
    assert report.ok and len(report.losses) == 3
    assert len({one_device for one_device, _ in report.losses}) == 3


def test_nothing_is_said_of_what_is_drawn_anew_each_time():
    class Noisy(layers.Layer):
        def call(self, x):
            return x + tf.raw_ops.RandomStandardNormal(shape=tf.shape(x), dtype=x.dtype)

    def noisy():
        inputs = keras.Input((WIDTH,))
        return compiled(inputs, layers.Dense(CLASSES, name="head")(Noisy()(inputs)))

    report = verified(parallel(noisy, (), (2,)))
    assert not report.ok
    assert report.random == ["RandomStandardNormal"]
    assert any("SeedGenerator" in reason for reason in report.reasons)


# --- the report -------------------------------------------------------------------------


@pytest.mark.slow
def test_the_report_has_the_worst_first_and_counts_the_rest():
    def deep():
        inputs = x = keras.Input((WIDTH,))
        for i in range(8):
            # Of another width than the others, so that the wrong rule is its own.
            x = layers.Dense(WIDTH + (i == 3), "tanh", name=f"d{i}")(x)
        return compiled(inputs, layers.Dense(CLASSES, name="head")(x))

    with planted_rule("BiasAddGrad", drops_sums, only=lambda op: "/d3" in op.name):
        report = verified(parallel(deep, (), (2,)))
    assert not report.ok and "d3/bias" in differing(report)
    lines = str(report).splitlines()
    rows = [line for line in lines if line.startswith("| ") and "verdict" not in line]
    first = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert first[0] == "d3/bias" and first[-1] == "DIFFERS"
    assert len(rows) < len(report.variables)
    assert any("more, none of them worse than equal" in line for line in lines)
    assert f"{len(report.variables)} variables: 1 DIFFERS" in str(report)
    assert "largest at d3/bias" in lines[-1]
