"""Everything that a Keras user does with a model, done with a parallel one."""

from __future__ import annotations

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.equivalence import assert_equivalent, assert_same, op_by_op, train
from tests.time_limits import time_limit

rng = np.random.default_rng(0)
X = rng.normal(size=(24, 6)).astype("float32")
Y = rng.integers(0, 3, 24).astype("int32")
DATA = (X, Y)
MESH = tap.split([2, 2])
COLUMN = [tap.shard("fc1/kernel", dim=1, axis="model")]


def build(optimizer="adam", **compile_arguments):
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(10, "tanh", name="fc1"), layers.Dense(3, name="fc2")]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    arguments = {"metrics": ["accuracy"], "jit_compile": False, **compile_arguments}
    model.compile(keras.optimizers.get(optimizer), loss, **arguments)
    return model


def parallel(constraints=COLUMN, mesh=MESH, **arguments):
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(mesh, constraints, planner=None):
        return build(**arguments)


def eager(**arguments):
    """The same model on one device, whose steps are not traced."""
    return op_by_op(lambda: build(**arguments))()


@pytest.mark.slow
def test_fit_with_validation_and_class_weights():
    assert_equivalent(
        build,
        DATA,
        MESH,
        COLUMN,
        epochs=2,
        validation_data=(X[:8], Y[:8]),
        class_weight={0: 1.0, 1: 2.0, 2: 0.5},
    )


@pytest.mark.slow
def test_sample_weights():
    weights = rng.uniform(size=24).astype("float32")
    assert_equivalent(lambda: build(weighted_metrics=["accuracy"]), (X, Y, weights), MESH, COLUMN)


@pytest.mark.slow
def test_evaluate_and_predict_before_fit():
    model = parallel()
    keras.utils.set_random_seed(7)
    plain = build()
    np.testing.assert_allclose(
        model.evaluate(X, Y, batch_size=8, verbose=0),
        plain.evaluate(X, Y, batch_size=8, verbose=0),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        model.predict(X, batch_size=8, verbose=0),
        plain.predict(X, batch_size=8, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )
    np.testing.assert_allclose(model(X), plain(X), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_on_batch_methods():
    model = parallel()
    keras.utils.set_random_seed(7)
    plain = build()
    for size in (8, 5, 8):
        got = model.train_on_batch(X[:size], Y[:size], return_dict=True)
        want = plain.train_on_batch(X[:size], Y[:size], return_dict=True)
        assert got.keys() == want.keys()
        for name, value in got.items():
            np.testing.assert_allclose(value, want[name], rtol=1e-4)
    np.testing.assert_allclose(model.test_on_batch(X, Y), plain.test_on_batch(X, Y), rtol=1e-4)
    np.testing.assert_allclose(model.predict_on_batch(X), plain.predict_on_batch(X), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, nightly(3)])
def test_steps_per_execution(steps):
    assert_equivalent(lambda: build(steps_per_execution=steps), DATA, MESH, COLUMN, epochs=2)


def _pydataset():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return X[i * 8 : i * 8 + 8], Y[i * 8 : i * 8 + 8]

    return Batches()


def _generator():
    while True:
        for i in range(0, 24, 8):
            yield X[i : i + 8], Y[i : i + 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        nightly(lambda: tf.data.Dataset.from_tensor_slices(DATA).batch(7)),
        _pydataset,
        nightly(_generator),
        lambda: tf.data.Dataset.from_tensor_slices(DATA).batch(8, drop_remainder=True).repeat(),
    ],
    ids=["tf.data", "PyDataset", "generator", "repeated"],
)
def test_data_sources(source):
    runs = []
    for make in (eager, parallel):
        keras.utils.set_random_seed(7)
        model = make()
        history = model.fit(source(), epochs=2, steps_per_epoch=3, verbose=0)
        runs.append((history.history, model.get_weights()))
    for key, values in runs[0][0].items():
        assert runs[1][0][key] == pytest.approx(values, rel=1e-4)
    for got, want in zip(runs[1][1], runs[0][1], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
def test_callbacks_see_whole_weights_and_change_the_learning_rate(tmp_path):
    shapes, rates = [], []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            shapes.append([w.shape for w in self.model.get_weights()])
            rates.append(float(self.model.optimizer.learning_rate))

    def callbacks():
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
            keras.callbacks.ModelCheckpoint(
                str(tmp_path / "best.keras"), monitor="loss", save_best_only=True
            ),
            keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True),
            Look(),
        ]

    runs = []
    for make in (eager, parallel):
        keras.utils.set_random_seed(7)
        model = make(optimizer="sgd")
        model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks())
        runs.append(model.get_weights())
    assert shapes[0] == shapes[3] and rates[:3] == rates[3:]
    for got, want in zip(runs[1], runs[0], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_weights_are_whole_from_outside():
    model = parallel()
    new = [rng.normal(size=w.shape).astype("float32") for w in model.get_weights()]
    model.set_weights(new)
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    model.set_weights(new)
    for got, want in zip(model.get_weights(), new, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_training_goes_on_with_a_saved_file_on_one_device_and_on_another_mesh(tmp_path):
    """Optimizer state included: training goes on as if it had never stopped."""
    path = str(tmp_path / "model.keras")
    keras.utils.set_random_seed(7)
    plain = eager()
    plain.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    model = parallel()
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    model.save(path)
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    resumed = op_by_op(lambda: keras.models.load_model(path))()
    resumed.fit(X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    with tap.auto_parallel([4], planner=None):
        again = keras.models.load_model(path)
    again.fit(X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    for other in (model, resumed, again):
        for got, want in zip(other.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.nightly
def test_saved_file_opens_in_plain_keras(tmp_path):
    path = str(tmp_path / "model.keras")
    model = parallel()
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    model.save(path)
    code = (
        f"import keras, numpy, sys; m = keras.models.load_model({path!r}); "
        f"m.predict(numpy.zeros((2, 6)), verbose=0); assert 'tfpar' not in sys.modules"
    )
    env = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=time_limit(120), env=env)


@pytest.mark.slow
def test_checkpoint_of_tensorflow(tmp_path):
    model = parallel()
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    saved = model.get_weights()
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "ckpt"))
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    tf.train.Checkpoint(model=model).restore(path)
    for got, want in zip(model.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_two_models_at_once_and_compile_again():
    first, second = parallel(), parallel((), tap.split([2]))
    keras.utils.set_random_seed(7)
    plain = eager()
    for model in (first, second, plain):
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    for model in (first, second, plain):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, run_eagerly=model is plain, jit_compile=False)
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    for model in (first, second):
        for got, want in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
def test_parallelize_a_trained_model():
    keras.utils.set_random_seed(7)
    plain, model = eager(), build()
    model.set_weights(plain.get_weights())
    for m in (plain, model):
        m.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    assert tap.parallelize(model, MESH, COLUMN, planner=None) is model
    for m in (plain, model):
        m.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    for got, want in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
def test_plain_call_switches_the_process_over():
    scope = tap.auto_parallel(MESH)
    try:
        model = train(build, DATA)
    finally:
        scope.__exit__()
    plain = train(op_by_op(build), DATA, start=model.start)
    assert_same(model, plain)
    assert tap.plan_of(model.model).mesh.size == MESH.size


def test_function_with_variables():
    with tap.auto_parallel([4], planner=None):
        w = tf.Variable(np.ones((3, 2), "float32"))

        @tap.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ w))
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

    x = rng.normal(size=(8, 3)).astype("float32")
    want, values = np.ones((3, 2), "float32"), []
    for _ in range(3):
        y = x @ want
        values.append((y**2).mean())
        want = want - 0.1 * (2 / y.size) * x.T @ y
    assert [float(step(x)) for _ in range(3)] == pytest.approx(values, rel=1e-5)
    np.testing.assert_allclose(w.numpy(), want, atol=1e-6)


@pytest.mark.slow
def test_run_eagerly_trains_on_one_device_and_says_so(caplog):
    model = parallel()
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True
    )
    before = model.get_weights()
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert "run_eagerly" in caplog.text
    assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.nightly
def test_verify_reports_every_variable():
    model = parallel()
    report = tap.verify(model, X[:8], Y[:8], steps=2)
    assert report.ok, str(report)
    assert {w.path for w in model.weights} < {v.name for v in report.variables}
    before = model.get_weights()
    tap.verify(model, X[:8], Y[:8], steps=1)
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_summary_and_coverage():
    model = parallel()
    assert tap.coverage(model).complete or tap.coverage(model).without_rule
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    text = tap.plan_of(model).summary(full=True)
    assert "fc1/kernel" in text and "all_reduce" in text
    assert "fc2/kernel" in tap.plan_of(model).explain(model.weights[2].path)


@pytest.mark.nightly
def test_plan_file_round_trip(tmp_path):
    keras.utils.clear_session(free_memory=False)  # Keras numbers names: start as a new process does
    model = parallel()
    model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    tap.plan_of(model).save(tmp_path / "plan.json")
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(plan=str(tmp_path / "plan.json")):
        again = build()
    again.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    for got, want in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
