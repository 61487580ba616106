"""Loops of TensorFlow 1 that gradients are taken through, TensorArrays, and `dynamic_rnn`."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.keras.layers.legacy_rnn import rnn_cell_impl

import tfpar as tap
from tests.tf.capture.test_v1_training import (
    OPTIMIZERS,
    X,
    assert_same,
    compare,
    control_flow_of_version_1,
)
from tfpar.spec import PlanError

v1 = tf.compat.v1
__all__ = ["control_flow_of_version_1"]  # a fixture of every test here


def trained(make, mesh):
    """A graph that learns from what `make` makes of `x` and a weight, compared."""

    def step(x):
        w = v1.get_variable("w", [3, 3], use_resource=True)
        loss = tf.reduce_sum(tf.square(make(x, w)))
        return [v1.train.AdamOptimizer(0.05).minimize(loss), loss]

    return compare(step, X, runs=3, mesh=mesh)


def repeated(x, w):
    return v1.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y @ w)), [0, x])[1]


def repeated_within(x, w):
    return v1.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, 0.9 * repeated(y, w)), [0, x])[1]


def branching(x, w):
    def body(i, y):
        y = v1.cond(i % 2 > 0, lambda: tf.tanh(y @ w), lambda: y * 2.0 + tf.reduce_sum(w))
        return i + 1, y

    return v1.while_loop(lambda i, y: i < 4, body, [0, x])[1]


def filled(x, w):
    """An array that is read twice a round, and one that is written."""
    given = tf.TensorArray(tf.float32, 4, clear_after_read=False)
    given = given.unstack(tf.stack([x @ w, x, x + 1.0, x * 2.0]))

    def body(i, y, made):
        y = tf.tanh(y @ w + given.read(i) + given.read(3 - i))
        return i + 1, y, made.write(i, y)

    made = v1.while_loop(lambda i, *_: i < 4, body, [0, x, tf.TensorArray(tf.float32, 4)])[2]
    return tf.reduce_sum(made.stack(), 0) * tf.cast(made.size(), tf.float32)


def read_where_written(x, w):
    array = tf.TensorArray(tf.float32, 4, clear_after_read=False).write(0, x)

    def body(i, array):
        return i + 1, array.write(i, tf.tanh(array.read(i - 1) @ w))

    array = v1.while_loop(lambda i, *_: i < 4, body, [1, array])[1]
    return array.read(3) + array.read(1)


def left_unread(x, w):
    """The gradient of what the array holds is zero, and is made as such."""

    def body(i, y, made):
        y = tf.tanh(y @ w)
        return i + 1, y, made.write(i, y)

    return v1.while_loop(lambda i, *_: i < 3, body, [0, x, tf.TensorArray(tf.float32, 3)])[1]


def gathered_twice(x, w):
    array = tf.TensorArray(tf.float32, 4, clear_after_read=False)
    return array.scatter([1, 0, 3, 2], x @ w).gather([3, 3, 1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, mesh",
    [
        (repeated, [2]),
        (repeated_within, [2, 2]),
        (branching, [2, 2]),
        (filled, [2, 2]),
        (read_where_written, [2]),
        (left_unread, [2]),
        (gathered_twice, [2]),
    ],
)
def test_loops_and_arrays_are_differentiated(make, mesh, capfd):
    trained(make, mesh)
    assert "No op rule" not in "".join(capfd.readouterr())


NO_SEARCH = {"planner": None}
STAGES = {"planner": "tap", "pipeline": tap.Pipeline(2, 2)}
"""The loop is in one of them; its counter, which bears a name of the backward pass, does not make
it a part of that."""


class Recurrent:
    """A classifier of sequences by `dynamic_rnn`, trained by `minimize`."""

    def __init__(self, cell, optimizer, lengths):
        self.graph = tf.Graph()
        with self.graph.as_default(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            v1.set_random_seed(3)
            x = v1.placeholder(tf.float32, [None, 3, 5], name="x")
            y = v1.placeholder(tf.int32, [None], name="y")
            n = v1.placeholder(tf.int32, [None], name="n") if lengths else None
            table = v1.get_variable("table", [5, 4], use_resource=True)
            outputs, _ = v1.nn.dynamic_rnn(
                cell(6), tf.tensordot(x, table, 1), sequence_length=n, dtype=tf.float32
            )
            head = v1.get_variable("head", [6, 3], use_resource=True)
            logits = tf.matmul(tf.reduce_sum(outputs, 1), head)
            self.loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            )
            self.train = optimizer.minimize(self.loss)
            self.saver = v1.train.Saver()
            self.init = v1.global_variables_initializer()
        rng = np.random.default_rng(0)
        self.feeds = {x: rng.normal(size=(4, 3, 5)).astype("float32"), y: np.array([0, 1, 2, 1])}
        if lengths:
            self.feeds[n] = np.array([3, 1, 2, 2])

    def values(self, session):
        return {v.op.name: session.run(v) for v in self.graph.get_collection("variables")}


@pytest.mark.parametrize(
    "cell, optimizer, lengths, mesh, options",
    [
        pytest.param("BasicLSTMCell", "adam", False, [2], NO_SEARCH, marks=pytest.mark.slow),
        pytest.param("BasicLSTMCell", "adam", True, [2, 2], NO_SEARCH, marks=pytest.mark.slow),
        pytest.param("BasicLSTMCell", "descent", False, [2], STAGES, marks=pytest.mark.slow),
        ("GRUCell", "descent", True, [2], {"planner": "tap"}),
    ],
)
def test_a_recurrent_network_trains(cell, optimizer, lengths, mesh, options, tmp_path, capfd):
    script = Recurrent(getattr(rnn_cell_impl, cell), OPTIMIZERS[optimizer](), lengths)
    program = tap.GraphProgram(script.graph, mesh, **options)
    with v1.Session(graph=script.graph) as session:
        session.run(script.init)
        program.restore(script.saver.save(session, str(tmp_path / "theirs")))
        for _ in range(3):
            _, want = session.run([script.train, script.loss], script.feeds)
            _, got = program.run([script.train, script.loss], script.feeds)
            np.testing.assert_allclose(got, want, rtol=1e-5)
        assert_same(program.values(), script.values(session))
    assert "No op rule" not in "".join(capfd.readouterr())
    (step,) = program._steps.values()
    (executable,) = step.executables.values()
    assert {"table", "head"} < {g.variable for g in executable.captured.gradients}


def test_a_loop_that_is_longer_than_a_stage_is_named():
    """By its own name: of a graph no layers are known."""
    script = Recurrent(rnn_cell_impl.GRUCell, OPTIMIZERS["descent"](), False)
    options = {"planner": "tap", "pipeline": tap.Pipeline(64, 1)}
    program = tap.GraphProgram(script.graph, tap.split([64]), **options)
    with pytest.raises(PlanError, match="64 stages are too many") as error:
        program.run(script.train, script.feeds)
    assert "The loop 'rnn/while' (its part takes" in str(error.value)
