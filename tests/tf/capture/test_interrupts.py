"""Ctrl-C while a step is traced: tracing ends at the next op, whoever swallows the exception."""

from __future__ import annotations

import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

import tfpar as tap
from tests.planning.test_incumbent import python_handles_it  # noqa: F401 - a fixture
from tfpar.tf.interop.graphs import trace


def press():
    signal.raise_signal(signal.SIGINT)


class Garbage:
    """Ctrl-C comes while it is collected, where Python shows an exception and goes on."""

    def __del__(self):
        press()


def in_garbage():
    Garbage()


def in_a_bare_except():
    try:
        press()
        tf.constant(1.0)
    except:  # noqa: E722 - as Keras does
        pass


def as_another_error():
    press()
    try:
        tf.constant(1.0)
    except BaseException as error:  # noqa: BLE001 - as C++ does
        raise SystemError("bad argument to internal function") from error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("pressed", [press, in_garbage, in_a_bare_except, as_another_error])
def test_tracing_ends_at_the_next_op(pressed, monkeypatch):
    made, ordered = [], []
    monkeypatch.setattr(auto_control_deps, "_get_resource_inputs", ordered.append)

    def step(x):
        made.append(tf.add(x, x))
        pressed()
        made.append(tf.add(x, x))

    with pytest.raises(KeyboardInterrupt):
        trace("step", step, [tf.TensorSpec([2])], add_control_dependencies=True)
    assert len(made) == 1 and not ordered  # nor does TensorFlow put the ops of the rest into order
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):  # not before the next op, of which there is none
        trace("step", lambda: press())


def test_a_second_one_waits_for_no_op():
    went_on = []

    def step():
        press()
        went_on.append("an op may be long in coming")
        press()
        went_on.append("twice")

    with pytest.raises(KeyboardInterrupt):
        trace("step", step)
    assert len(went_on) == 1


def test_handlers_of_the_users_own_and_other_threads_are_left_alone():
    pressed = []
    handler = lambda number, frame: pressed.append(number)  # noqa: E731
    signal.signal(signal.SIGINT, handler)
    trace("step", press)
    assert pressed == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.default_int_handler)
    graphs = []
    thread = threading.Thread(target=lambda: graphs.append(trace("step", lambda: tf.constant(1.0))))
    thread.start()
    thread.join()
    assert [op.type for op in graphs[0].get_operations()] == ["Const"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_model_trains_after_an_interrupted_fit():
    """Ctrl-C while its optimizer is built, and while it is called: nothing is left half done."""
    pressed = []

    class Interrupted(keras.optimizers.Adam):
        def build(self, variables):
            if not pressed:
                pressed.append("build")
                Garbage()
            super().build(variables)

    def called(x):
        if pressed == ["build"]:
            pressed.append("call")
            return x
        if pressed == ["build", "second fit"]:
            pressed.append("call")
            Garbage()
        return x

    x, y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")
    with tap.auto_parallel([2], planner=None, verbose=0):
        layers = [keras.Input((3,)), keras.layers.Lambda(called), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile(Interrupted(), "mse")
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, verbose=0)
    assert pressed == ["build"]
    pressed.append("second fit")
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, verbose=0)
    assert pressed[-1] == "call"
    model.fit(x, y, verbose=0)
    assert len(model.optimizer.variables) == 2 + 2 * 2 and model.optimizer.iterations == 1
