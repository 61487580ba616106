"""`trials=`: the best few plans run some steps, the fastest is kept, and all else is as before."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.e2e.test_pipelines_found import deep, machines, rows
from tests.equivalence import assert_equivalent, train
from tfpar.cluster import Correction, write_cluster
from tfpar.observability.report import explain_rejection
from tfpar.spec import ArgumentError
from tfpar.tf.steps import trials as module

SLOW_LINKS = machines(3e6)
"""Says that stages are fastest; in one process, where nothing goes over a link, they are not."""


def small() -> keras.Model:
    inputs = keras.Input((6,))
    h = layers.Dropout(0.2, seed=3)(layers.Dense(8, "relu", name="first")(inputs))
    model = keras.Model(inputs, layers.Dense(3, name="last")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"], jit_compile=False)
    return model


def fitted(trials: tap.Trials | int) -> keras.Model:
    keras.utils.set_random_seed(1)
    with tap.auto_parallel([2], trials=trials, planner="tap", cluster="cpu", verbose=0):
        model = small()
    model.fit(*rows(8, 6), batch_size=8, verbose=0)
    return model


@pytest.mark.slow
def test_trials_change_the_choice_and_no_number(tmp_path):
    data, asked = rows(16), {"pipeline": "auto", "trials": 3}
    parallel, _ = assert_equivalent(
        deep,
        data,
        tap.split([2]),
        planner="tap",
        cluster=SLOW_LINKS,
        options=asked,
        batch_size=16,
    )
    plan = tap.plan_of(parallel.model)
    first, *others = plan.findings.trials
    assert plan.stages is None and first.name.startswith("no stages")
    assert first.measured_s == min(trial.measured_s for trial in plan.findings.trials)
    predicted = min(plan.findings.trials, key=lambda trial: trial.seconds)
    assert predicted is not first and predicted.name.startswith("2 stages")
    assert len({trial.name for trial in plan.findings.trials}) == len(plan.findings.trials) == 3
    assert first.seconds == plan.cost.seconds
    # The machines that explain what was measured, by which the others were left out: how slow this
    # one is says how far off the prediction was.
    off, left = (math.log(s / first.measured_s) for s in (first.seconds, first.corrected_s))
    assert abs(left) < 0.8 * abs(off)
    write_cluster(plan.corrected_cluster, tmp_path / "corrected.toml")
    asked_again = {"cluster": tmp_path / "corrected.toml", "pipeline": "auto", "planner": "tap"}
    again = tap.plan(deep, data, [2], **asked_again)
    assert again.cluster.fingerprint() == plan.corrected_cluster.fingerprint()
    untried = {r.name for r in plan.findings.rivals} - {t.name for t in plan.findings.trials}
    assert all(r.corrected_s for r in plan.findings.rivals if r.name in untried and r.cost)
    # What was tried lost by what was measured, whatever was predicted.
    rival = next(rival for rival in plan.findings.rivals if rival.name == predicted.name)
    assert "measured" in explain_rejection(rival, plan)
    assert "Plans that were tried" in plan.summary(full=True)
    again = tap.Plan.from_json(plan.to_json())
    for name in ("trials", "rivals", "correction"):
        assert getattr(again.findings, name) == getattr(plan.findings, name)
    # The very same steps as of a model that was given this plan.
    given = train(
        deep,
        data,
        mesh=tap.split([2]),
        planner="auto",
        batch_size=16,
        start=parallel.start,
        options={"plan": plan},
    )
    assert given.losses == parallel.losses
    for mine, its in zip(given.weights, parallel.weights, strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.slow
def test_machines_that_are_not_as_described_are_found_out(monkeypatch):
    """Each trial takes what its plan costs on machines with devices three times as slow as
    described and links three times as fast: the second one is the best of all, by description the
    last."""
    truth, told = Correction(work=3.0, between=1 / 3), []

    def measured(self, name, plan):
        ranking = self._step.planner.ranking(self._step.prepared(self._specs), 32, [plan])
        told.append(plan.cost.seconds)
        assert ranking.seconds(0) == pytest.approx(told[-1])
        ranking.correction = truth
        return ranking.seconds(0)

    monkeypatch.setattr(module._Trials, "_measured", measured)
    asked = {"cluster": machines(3e7), "pipeline": "auto", "planner": "tap", "verbose": 0}
    with tap.auto_parallel([2], trials=2, **asked):
        model = deep(32)
    model.fit(*rows(32, 32), batch_size=32, verbose=0)
    plan = tap.plan_of(model)
    found = plan.findings
    assert plan.stages is None and plan.batch_axes and plan.cost.seconds == told[1]
    left = [rival for rival in found.rivals if rival.name not in {t.name for t in found.trials}]
    assert left and told[1] > max(rival.seconds for rival in left)
    assert found.correction.work == pytest.approx(truth.work, rel=0.3)
    assert found.correction.between < 0.6
    for trial in found.trials:
        assert trial.corrected_s == pytest.approx(trial.measured_s, rel=0.1)
    for rival in left:
        assert rival.corrected_s > found.trials[0].measured_s
        assert explain_rejection(rival, plan).startswith("not tried: corrected by trials, ")
    assert "By trials, work takes" in plan.summary(full=True)


class Noisy(layers.Layer):
    """Adds what TensorFlow's own generators draw, which keep a state in their kernels."""

    def call(self, x, training=False):
        return x + tf.random.uniform(tf.shape(x)) if training else x


def noisy() -> keras.Model:
    inputs = keras.Input((6,))
    h = Noisy()(layers.Dense(8, "relu", name="first")(inputs))
    model = keras.Model(inputs, layers.Dense(3, name="last")(layers.Dropout(0.2)(h)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, jit_compile=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("start", [nightly(None), "trained"])
def test_random_state_is_as_without_trials(start):
    """Draws of kernels, and of generators that have drawn before."""
    x, y = rows(16, 6)

    def losses(**asked) -> list[float]:
        keras.utils.set_random_seed(3)
        with tap.auto_parallel([2], cluster="cpu", verbose=0, **asked):
            model = noisy()
        if start:
            model.evaluate(x, y, verbose=0)
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=True, verbose=0).history
        plans.append(tap.plan_of(model))
        return history["loss"]

    plans: list[tap.Plan] = []
    tried = losses(planner="tap", trials=2)
    assert len(plans[0].findings.trials) == 2
    assert tried == losses(plan=plans[0])


@pytest.mark.slow
def test_a_plan_that_cannot_be_run_is_left_out(monkeypatch, caplog):
    """It ends amid its steps, with the weights changed: they are as before."""
    taken = []
    original = module._Trials._take

    def take(self, executable):
        seconds = original(self, executable)
        taken.append(executable)
        if len(taken) == 2:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating\nmore")
        return seconds

    monkeypatch.setattr(module._Trials, "_take", take)
    parallel, _ = assert_equivalent(
        small,
        rows(8, 6),
        tap.split([2]),
        planner="tap",
        cluster="cpu",
        options={"trials": tap.Trials(plans=2, steps=2)},
    )
    plan = tap.plan_of(parallel.model)
    ran, failed = plan.findings.trials
    assert failed.seconds <= ran.seconds and failed.measured_s is None
    assert failed.reason == "failed: OOM when allocating"
    assert ran.corrected_s == pytest.approx(ran.measured_s, rel=0.1)  # by it alone
    assert plan.cost.seconds == ran.seconds
    (line,) = [line for line in caplog.messages if "left out" in line]
    assert failed.name in line and "OOM when allocating" in line
    assert "failed: OOM" in plan.summary(full=True)
    assert len(taken) == 2 + 3


@pytest.mark.nightly
def test_where_no_plan_can_be_run_the_first_is_taken(monkeypatch, caplog):
    def take(self, executable):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    monkeypatch.setattr(module._Trials, "_take", take)
    plan = tap.plan_of(fitted(trials=2))
    assert not plan.findings.trials and plan.corrected_cluster is None
    assert plan.cost.seconds <= plan.findings.rivals[0].cost.seconds
    assert sum("left out" in line for line in caplog.messages) == 2


@pytest.mark.slow
def test_trials_end_with_their_time(monkeypatch):
    taken = []
    original = module._Trials._take

    def take(self, executable):
        taken.append(executable)
        return original(self, executable)

    monkeypatch.setattr(module._Trials, "_take", take)
    plan = tap.plan_of(fitted(tap.Trials(plans=3, steps=50, seconds=1e-6)))
    assert len(plan.findings.trials) == 1 and len(taken) == 2


@pytest.mark.slow
def test_ctrl_c_in_a_trial_leaves_weights_and_the_choice_as_they_were(monkeypatch):
    original = module._Trials._take

    def take(self, executable):
        original(self, executable)
        raise KeyboardInterrupt

    x, y = rows(16, 6)
    with tap.auto_parallel([2], trials=2, planner="tap", cluster="cpu", verbose=0):
        model = small()
    before = model.get_weights()
    with monkeypatch.context() as patch:
        patch.setattr(module._Trials, "_take", take)
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, batch_size=16, verbose=0)
    for mine, its in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, its)
    assert int(model.optimizer.iterations) == 0
    model.fit(x, y, batch_size=16, verbose=0)
    assert len(tap.plan_of(model).findings.trials) == 2


@pytest.mark.slow
def test_a_step_with_a_lasting_effect_is_not_tried(caplog):
    seen = []

    class Telling(layers.Layer):
        def call(self, x):
            return tf.ensure_shape(tf.numpy_function(self.tell, [x], x.dtype), x.shape)

        def tell(self, x):
            seen.append(len(x))
            return x

    def telling() -> keras.Model:
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(3)(Telling()(inputs)))
        model.compile(
            "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
        )
        return model

    x, y = rows(8, 6)
    with tap.auto_parallel([1], cluster="cpu", planner="tap", trials=2, verbose=0):
        model = telling()
    model.fit(x, y, batch_size=8, verbose=0)
    assert len(seen) == 1 and not tap.plan_of(model).findings.trials
    (line,) = [line for line in caplog.messages if "without trials" in line]
    assert "has an effect" in line


@pytest.mark.slow
def test_a_function_that_trains_is_tried_too():
    x = np.ones((4, 3), "float32")

    def trained(**asked) -> tuple[list[float], tap.Plan]:
        with tap.auto_parallel([2], cluster="cpu", verbose=0, **asked):
            weight = tf.Variable(np.full((3, 2), 0.5, "float32"), name="weight")

            @tap.function
            def step(batch):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((batch @ weight) ** 2)
                weight.assign_sub(0.1 * tape.gradient(loss, weight))
                return loss

        return [float(step(tf.constant(x))) for _ in range(3)], step.plan

    losses, plan = trained(planner="tap", trials=2)
    assert len(plan.findings.trials) == 2
    assert losses == trained(plan=plan)[0] and losses[0] == pytest.approx(2.25)


@pytest.mark.parametrize(
    "refused",
    [
        lambda: tap.Trials(plans=0),
        lambda: tap.Trials(steps=0),
        lambda: tap.Trials(seconds=0),
        lambda: tap.auto_parallel([2], trials=2, planner=None),
    ],
)
def test_trials_of_nothing_are_refused(refused):
    with pytest.raises(ArgumentError, match="plans|steps|seconds|nothing to choose from"):
        refused()
