"""What users do before, between and after training steps."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfpar as tap
from tests.e2e.features import COLUMN, MESH, f, perceptron, same
from tests.equivalence import op_by_op, train


@pytest.fixture(scope="module")
def trained():
    """A model that trained on a mesh, and the same on one device."""
    return same(perceptron, (f(8, 6), f(8, 2)))


@pytest.mark.slow
def test_training_inside_the_block():
    data = f(8, 6), f(8, 2)
    plain = train(op_by_op(perceptron), data, batch_size=4)
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(MESH, COLUMN, planner=None):
        model = perceptron()
        model.set_weights(plain.start)
        model.fit(*data, batch_size=4, shuffle=False, verbose=0)
        inside = model.predict(data[0], verbose=0)
    np.testing.assert_allclose(inside, plain.model(data[0]), atol=1e-5)
    for got, want in zip(model.get_weights(), plain.weights, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
def test_the_user_reads_and_writes_weights_in_functions_of_their_own(trained):
    parallel, plain = trained
    x = tf.constant(f(3, 6))
    results = []
    for run in (parallel, plain):
        model = run.model

        @tf.function
        def forward(x, model=model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x) ** 2)
            return loss, tape.gradient(loss, model.trainable_variables[0].value)

        kernel = model.get_layer("fc1").kernel
        before = forward(x)
        kernel.assign(kernel * 2.0)
        kernel.assign_add(ops.ones_like(kernel))
        results.append(
            [
                *before,
                *forward(x),
                tf.reduce_sum(kernel),
                kernel[1, 2],
                kernel @ kernel.value.numpy().T,
            ]
        )
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_function_traced_before_training_is_never_silently_stale():
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(MESH, COLUMN, planner=None):
        model = perceptron()
    norm = tf.function(lambda: sum(tf.reduce_sum(w**2) for w in model.trainable_variables))
    want = sum((w**2).sum() for w in model.get_weights())
    assert float(norm()) == pytest.approx(want, rel=1e-5), "variables were never read before"
    model.fit(f(4, 6), f(4, 2), batch_size=4, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        norm()
    again = tf.function(lambda: sum(tf.reduce_sum(w**2) for w in model.trainable_variables))
    want = sum((w**2).sum() for w in model.get_weights())
    assert float(again()) == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_callbacks_that_change_weights_and_state(tmp_path):
    def run(name):
        model = perceptron(keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True))
        model.run_eagerly = name == "plain"
        x, y = np.ones((8, 6), "float32"), np.ones((8, 2), "float32")
        callbacks = [
            keras.callbacks.BackupAndRestore(str(tmp_path / name)),
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=1.0),
            keras.callbacks.TerminateOnNaN(),
        ]
        history = model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
        return history.history, model.get_weights()

    keras.utils.set_random_seed(7)
    want = run("plain")
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(MESH, COLUMN, planner=None):
        got = run("parallel")
    assert got[0]["learning_rate"] == want[0]["learning_rate"]
    assert got[0]["loss"] == pytest.approx(want[0]["loss"], rel=1e-4)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_backup_restores_an_interrupted_run(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    data = f(8, 6), f(8, 2)
    arguments = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(7)
    plain = op_by_op(perceptron)()
    plain.fit(*data, **arguments)
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(MESH, COLUMN, planner=None):
        model = perceptron()
    backup = keras.callbacks.BackupAndRestore(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data, callbacks=[backup, Interrupt()], **arguments)
    keras.utils.set_random_seed(8)
    with tap.auto_parallel(MESH, COLUMN, planner=None):
        again = perceptron()
    history = again.fit(
        *data, callbacks=[keras.callbacks.BackupAndRestore(str(tmp_path))], **arguments
    )
    assert len(history.history["loss"]) == 2
    for got, want in zip(again.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.slow
def test_function_with_structures_and_several_variables():
    start = {"w": f(6, 10), "v": f(10, 2)}

    def make():
        weights = {n: tf.Variable(v, name=n) for n, v in start.items()}
        count = tf.Variable(0, trainable=False)

        def step(batch, rate, scale):
            with tf.GradientTape() as tape:
                out = tf.tanh(batch["x"] @ weights["w"]) @ weights["v"]
                loss = scale * tf.reduce_mean((out - batch["y"]) ** 2)
            for variable, gradient in zip(
                weights.values(), tape.gradient(loss, list(weights.values())), strict=True
            ):
                variable.assign_sub(rate * gradient)
            count.assign_add(1)
            return {"loss": loss, "out": (out, count.read_value()), "none": None}

        return weights, step

    weights, step = make()
    plain = tf.function(step)
    with tap.auto_parallel(MESH, [tap.shard("w", dim=1, axis="model")], planner=None):
        sharded, inner = make()
        parallel = tap.function(inner)
    for n in (8, 5, 8):
        batch = {"x": f(n, 6), "y": f(n, 2)}
        got, want = parallel(batch, 0.1, 0.5), plain(batch, 0.1, 0.5)
        tf.nest.assert_same_structure(got, want)
        for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
            if b is not None:
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for name, variable in weights.items():
        np.testing.assert_allclose(sharded[name].numpy(), variable.numpy(), atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_functions_that_read_slots_before_weights(momentum):
    """Gradients are arguments: nothing reads a weight before the optimizer reads its slots."""

    start, gradients = f(4, 2), (f(4, 2), f(4, 2))

    def make():
        optimizer = keras.optimizers.SGD(0.5, momentum=momentum)
        weight = keras.Variable(start)
        optimizer.build([weight])
        return weight, optimizer, lambda g: optimizer.apply_gradients([(g, weight)])

    weight, _, step = make()
    plain = tf.function(step)
    with tap.auto_parallel([4], planner=None):
        sharded, optimizer, inner = make()
        parallel = tap.function(inner)
    for gradient in gradients:
        parallel(gradient)
        plain(gradient)
    np.testing.assert_allclose(sharded.numpy(), weight.numpy(), rtol=1e-6)


@pytest.mark.slow
def test_functions_with_python_control_flow_on_tensors():
    weight = f(6, 2)

    def make(w):
        def step(x, limit):
            total = 0.0
            for k in tf.range(limit):
                if tf.reduce_sum(x) > tf.cast(k, "float32"):
                    total += tf.reduce_sum(tf.nn.relu(x @ w)) * float(k + 1)
                else:
                    w.assign_sub(tf.ones_like(w))
            return total

        return step

    v = tf.Variable(weight)
    plain = tf.function(make(v))
    with tap.auto_parallel([4], planner=None):
        w = tf.Variable(weight)
        functions = [tap.function(make(w)), tap.function(tf.function(make(w)))]
    for parallel in functions:
        for n in (8, 7):
            x = np.abs(f(n, 6)) / 20
            np.testing.assert_allclose(parallel(x, 4), plain(x, 4), rtol=1e-5)
            np.testing.assert_allclose(w.numpy(), v.numpy(), rtol=1e-5)
