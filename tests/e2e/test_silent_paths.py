"""Models that would end up on one device without a word: parallel, or one warning."""

import concurrent.futures
import copy
import logging
import pickle
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from tfpar.tf.keras import parallel_model

rng = np.random.default_rng(0)
X = rng.normal(size=(8, 4)).astype("float32")
Y = rng.normal(size=(8, 2)).astype("float32")


def build(**arguments):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="a")], name="net")
    model.compile("sgd", "mse", **arguments)
    return model


def on_mesh(size=2):
    return tap.auto_parallel([size], planner=None, verbose=0)


def mesh_size(model):
    state = parallel_model(model)
    return None if state is None else state.session.mesh.size


@pytest.fixture
def warnings(caplog):
    """What is warned of, so far."""
    caplog.set_level(logging.WARNING, "tfpar")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "tfpar"]


def in_thread(act):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


# --- threads -----------------------------------------------------------------------


def test_a_thread_begins_in_the_block_that_started_it(warnings):
    with on_mesh():
        model = in_thread(build)
        nested = in_thread(lambda: in_thread(build))
        assert mesh_size(model) == mesh_size(nested) == 2
        assert not model.weights[0].value.is_sharded  # pending: it never was in memory
    model.fit(X, Y, verbose=0)
    assert tap.plan_of(model).mesh.size == 2
    assert mesh_size(in_thread(build)) is None and not warnings()


def test_a_thread_that_outlives_its_block_leaves_it(warnings):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with on_mesh():
            assert mesh_size(pool.submit(build).result()) == 2
        after = pool.submit(build).result()
        assert mesh_size(after) is None and not hasattr(after.weights[0].value, "is_sharded")
    assert not warnings()


def test_blocks_of_two_threads_do_not_mix(warnings):
    both = threading.Barrier(2)

    def work(size):
        with on_mesh(size):
            both.wait()
            found = [mesh_size(build()), mesh_size(in_thread(build))]
            both.wait()
            return found

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, [2, 4])) == [[2, 2], [4, 4]]
    assert not warnings()


def test_a_thread_that_was_there_before_is_warned(warnings):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with on_mesh():
            models = [pool.submit(build).result() for _ in range(2)]
    assert [mesh_size(m) for m in models] == [None, None]
    (text,) = warnings()
    assert "tap.parallelize" in text and "'net'" in text


# --- copies ------------------------------------------------------------------------


def test_what_is_compiled_in_a_block_is_parallel():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model = keras.Sequential([keras.Input((4,)), inner])
    before = model.get_weights()
    with on_mesh():
        model.compile("sgd", "mse")
    assert mesh_size(model) == mesh_size(inner) == 2
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    with on_mesh(4):
        model.compile("sgd", "mse")  # has its mesh
    model.fit(X, Y, verbose=0)
    assert tap.plan_of(model).mesh.size == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", [copy.deepcopy, keras.models.clone_model])
def test_copies_run_on_the_mesh_of_the_original(how, warnings):
    with on_mesh():
        model = build()
    model.fit(X, Y, verbose=0)
    copied = how(model)
    copied.set_weights(model.get_weights())
    copied.compile("sgd", "mse")
    losses = [m.fit(X, Y, verbose=0).history["loss"] for m in (model, copied)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert mesh_size(copied) == 2 and tap.plan_of(copied) is not tap.plan_of(model)
    assert copied.weights[0].value is not model.weights[0].value
    assert not warnings()
    assert mesh_size(how(build())) is None


@pytest.mark.slow
def test_a_pickle_holds_no_mesh(warnings):
    with on_mesh():
        model = build()
    model.fit(X, Y, verbose=0)
    data = pickle.dumps(model)
    (text,) = warnings()
    assert "net" in text and "tap.parallelize" in text
    assert mesh_size(pickle.loads(data)) is None
    with on_mesh(4):
        restored = pickle.loads(data)
    assert mesh_size(restored) == 4
    np.testing.assert_array_equal(restored.get_weights()[0], model.get_weights()[0])
    pickle.dumps(build())
    assert len(warnings()) == 1


# --- loops of one's own ----------------------------------------------------------------


def step(model):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(X) - Y))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("how", ["tape", "function"])
def test_a_loop_that_runs_on_one_device_is_warned_of(how, fitted, warnings):
    if fitted:
        with on_mesh():
            model = build()
        model.fit(X, Y, verbose=0)
    else:
        model = tap.parallelize(build(), [2], planner=None, verbose=0)
    run = step if how == "tape" else tf.function(step)
    for _ in range(2):
        run(model)
    (text,) = warnings()
    assert ("GradientTape" if how == "tape" else "'step'") in text
    assert "tap.function" in text


@pytest.mark.slow
def test_what_runs_on_the_mesh_is_not_warned_of(warnings, tmp_path):
    with on_mesh():
        model = build()

        @tap.function
        def own(x):
            return model(x)

    own(X)
    model.fit(X, Y, verbose=0)
    model.predict(X, verbose=0)
    model(X)
    model.get_weights()
    assert tap.verify(model, X, Y, steps=1).ok
    model.export(tmp_path / "exported", verbose=False)
    model.save(tmp_path / "saved.keras")
    assert not warnings()
