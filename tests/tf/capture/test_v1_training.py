"""Scripts of TensorFlow 1: searched plans, reference variables, `tf.cond` and `tf.while_loop`."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tests.cases import at_night
from tfpar.spec import CaptureError
from tfpar.tf.capture.graph_sources import from_graph

v1 = tf.compat.v1
BATCH, FEATURES, HIDDEN, CLASSES = 16, 8, 64, 10
RATE = 0.05


@pytest.fixture(autouse=True)
def control_flow_of_version_1():
    """As scripts of TensorFlow 1 have it; other tests use version 2."""
    enabled = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    yield
    if enabled:
        v1.enable_control_flow_v2()


class Script:
    """A training script: placeholders, get_variable, a cond, minimize, a Saver."""

    def __init__(self, optimizer, use_resource=False):
        self.graph = tf.Graph()
        with self.graph.as_default():
            v1.set_random_seed(3)
            self.x = v1.placeholder(tf.float32, [None, FEATURES], name="x")
            self.y = v1.placeholder(tf.int32, [None], name="y")
            self.training = v1.placeholder_with_default(True, [], name="training")
            with v1.variable_scope("net", use_resource=use_resource):
                w = v1.get_variable("w", [FEATURES, HIDDEN])
                b = v1.get_variable("b", [HIDDEN], initializer=v1.zeros_initializer())
                head = v1.get_variable("head", [HIDDEN, CLASSES])
                mean = v1.get_variable(
                    "mean", [HIDDEN], initializer=v1.zeros_initializer(), trainable=False
                )
            hidden = tf.nn.relu(tf.matmul(self.x, w) + b)

            def by_the_batch():
                now = tf.reduce_mean(hidden, 0)
                with tf.control_dependencies([v1.assign(mean, 0.9 * mean + 0.1 * now)]):
                    return hidden - now

            centered = v1.cond(self.training, by_the_batch, lambda: hidden - mean)
            logits = tf.matmul(centered, head)
            self.loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self.y, logits=logits)
            )
            step = v1.train.get_or_create_global_step()
            self.train = optimizer.minimize(self.loss, global_step=step, name="train")
            self.saver = v1.train.Saver()
            self.init = v1.global_variables_initializer()
        rng = np.random.default_rng(0)
        self.feeds = {
            self.x: rng.normal(size=(BATCH, FEATURES)).astype("float32"),
            self.y: rng.integers(0, CLASSES, BATCH).astype("int32"),
        }

    def values(self, session):
        return {v.op.name: session.run(v) for v in self.graph.get_collection("variables")}


def assert_same(got, want):
    assert set(got) == set(want)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6, err_msg=name)


OPTIMIZERS = {
    "descent": lambda: v1.train.GradientDescentOptimizer(RATE),
    "momentum": lambda: v1.train.MomentumOptimizer(RATE, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(RATE),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", *at_night("descent", "momentum")])
def test_a_script_trains_under_a_searched_plan(kind, tmp_path, capfd):
    script = Script(OPTIMIZERS[kind]())
    program = tap.GraphProgram(
        script.graph, [4], planner="tap", cluster="v100-ethernet", memory_limit="12 KB"
    )
    with v1.Session(graph=script.graph) as session:
        session.run(script.init)
        program.restore(script.saver.save(session, str(tmp_path / "theirs")))
        for _ in range(3):
            _, want = session.run([script.train, script.loss], script.feeds)
            _, got = program.run([script.train, script.loss], script.feeds)
            np.testing.assert_allclose(got, want, rtol=1e-5)
        session.run(script.train, script.feeds)
        program.run(script.train, script.feeds)  # other fetches: the same plan serves them
        evaluation = {**script.feeds, script.training: False}
        want = session.run(script.loss, evaluation)
        np.testing.assert_allclose(program.run(script.loss, evaluation), want, rtol=1e-5)
        final = script.values(session)
        assert_same(program.values(), final)
        path = program.save(str(tmp_path / "ours"))
        session.run(script.init)
        script.saver.restore(session, path)
        assert_same(script.values(session), final)
    assert any(v.spec and "S" in str(v.spec) for v in program.plan.variables.values())
    assert "Found by the tap planner" in tap.plan_of(program).summary()
    assert "has changed" not in "".join(capfd.readouterr())
    step, *_ = [e for s in program._steps.values() for e in s.executables.values() if s._trains]
    assert {g.variable for g in step.captured.gradients} == {"net/w", "net/b", "net/head"}


def test_a_plan_of_a_file_serves_other_fetches(tmp_path):
    script = Script(OPTIMIZERS["adam"](), use_resource=True)
    planned = tap.GraphProgram(script.graph, [2], planner="tap", cluster="v100-ethernet")
    with pytest.raises(tap.TfparError, match="no plan yet"):
        _ = planned.plan
    want = planned.run([script.train, script.loss], script.feeds)[1]
    planned.plan.save(str(tmp_path / "plan.json"))
    program = tap.GraphProgram(script.graph, plan=tmp_path / "plan.json")
    np.testing.assert_allclose(program.run(script.loss, script.feeds), want, rtol=1e-5)
    assert program.run(script.train, script.feeds) is None
    small = tap.GraphProgram(script.graph, [2], planner="tap", memory_limit="1 KB")
    with pytest.raises(tap.TfparError, match="No plan fits into the memory"):
        small.run(script.train, script.feeds)


def test_verify_compares_with_a_session():
    script = Script(OPTIMIZERS["momentum"]())
    program = tap.GraphProgram(script.graph, [2], planner=None)
    start = program.values()
    report = program.verify([script.train, script.loss], script.feeds, steps=2)
    assert report, report
    assert {d.name for d in report.differences} == {*start, script.loss.name}
    assert_same(program.values(), start)
    (step,) = program._steps.values()
    (executable,) = step.executables.values()
    run = executable.program

    def wrong(fed, handles):
        """The step, and behind it a weight that is a little larger."""
        results = run(fed, handles)
        program.variables["net/head"].assign(program.variables["net/head"].read_value() * 1.01)
        return results

    executable.program = wrong
    report = program.verify([script.train, script.loss], script.feeds, steps=2)
    assert not report
    assert "net/head" in [d.name for d in report.differences if not d.ok]
    assert "DIFFERS" in str(report)


# --- graphs as they come -----------------------------------------------------------------


def compare(make, feeds, runs=2, constraints=(), mesh=(2,)):
    """A graph in a Session and on a mesh: fetches of every run, and variables at the end."""
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(3)
        x = v1.placeholder(tf.as_dtype(feeds.dtype), [None, *feeds.shape[1:]], name="x")
        fetches = make(x)
        init = v1.global_variables_initializer()
    with v1.Session(graph=graph) as session:
        session.run(init)
        wanted = [session.run(fetches, {x: feeds}) for _ in range(runs)]
        values = {v.op.name: session.run(v) for v in graph.get_collection("variables")}
    program = tap.GraphProgram(graph, list(mesh), constraints, planner=None)
    for want in wanted:
        got = program.run(fetches, {x: feeds})
        for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
            if b is not None:
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert_same(program.values(), values)
    return program


X = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")


def reference(name, shape, dtype=tf.float32, **options):
    return v1.get_variable(name, shape, dtype, use_resource=False, **options)


def test_references_are_handed_on_and_read_in_order():
    def make(x):
        w = reference("w", [5, 3], initializer=v1.ones_initializer())
        n = reference("n", [], tf.int32, initializer=v1.zeros_initializer(), trainable=False)
        scattered = v1.scatter_add(w, [0, 2], x[:2])
        with tf.control_dependencies([scattered]):
            first = w.read_value() + 0.0
        with tf.control_dependencies([first]):
            lowered = v1.assign_sub(w, 0.1 * tf.ones([5, 3]))
        handed_on = lowered * 2.0  # of the reference that the assignment gives
        with tf.control_dependencies([v1.assign_add(n, 2)]):
            counted = v1.count_up_to(n, 100)
        return [first, handed_on, counted, v1.is_variable_initialized(w), w, n.op.outputs[0]]

    # The last two race with the updates in a Session too: after one run all are done.
    compare(lambda x: make(x)[:4], X)
    graph = tf.Graph()
    with graph.as_default():
        fetches = make(v1.placeholder(tf.float32, [None, 3], name="x"))
    program = tap.GraphProgram(graph, [2], planner=None)
    np.testing.assert_array_equal(program.run(fetches[4]), np.ones((5, 3)))
    assert program.run("n:0") == 0


def test_a_variable_initialised_from_another():
    def make(x):
        a = reference("a", None, initializer=tf.ones([3]) * 2.0)
        b = v1.Variable(a.initialized_value() * 2.0, name="b", use_resource=False)
        return x * b

    compare(make, X)


def sparse(optimizer):
    def make(x):
        table = reference("table", [9, 4])
        loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, x)))
        return [optimizer().minimize(loss), loss]

    return make, np.array([[0, 3], [3, 8]])


def clipped(x):
    w, b = reference("w", [3, 3]), reference("b", [3])
    loss = tf.reduce_sum(tf.square(tf.matmul(x, w) + b))
    gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, [w, b]), 1.0)
    optimizer = v1.train.RMSPropOptimizer(0.1)
    return [optimizer.apply_gradients(zip(gradients, [w, b], strict=True)), loss]


def assigned(x):
    w = reference("w", [3, 3])
    loss = tf.reduce_sum(tf.square(tf.matmul(x, w)))
    (gradient,) = tf.gradients(loss, [w])
    return [v1.assign(w, w - 0.1 * gradient).op, loss]


def decayed(x):
    w = reference("w", [3, 3])
    return [v1.assign(w, w * 0.5).op]


@pytest.mark.parametrize(
    "make, feeds, marked",
    [
        (*sparse(lambda: v1.train.AdamOptimizer(0.1)), {"table": "gradients/"}),
        (*sparse(lambda: v1.train.GradientDescentOptimizer(0.1)), {"table": "gradients/"}),
        (clipped, X, {"w": "clip_by_global_norm", "b": "clip_by_global_norm"}),
        (assigned, X, {"w": "gradients/"}),
        (decayed, X, {}),
    ],
    ids=["sparse adam", "sparse descent", "clipped", "assigned", "decayed"],
)
def test_gradients_are_found_in_front_of_updates(make, feeds, marked):
    program = compare(make, feeds)
    (step,) = program._steps.values()
    (executable,) = step.executables.values()
    found = {g.variable: g.values.op.name for g in executable.captured.gradients}
    assert set(found) == set(marked)
    assert all(found[name].startswith(scope) for name, scope in marked.items())


# --- control flow of version 1 -------------------------------------------------------------


def test_nested_branches_with_effects_and_their_gradients():
    def make(x):
        w = reference("w", [3])
        calls = reference("calls", [], initializer=v1.zeros_initializer(), trainable=False)

        def outer():
            with tf.control_dependencies([v1.assign_add(calls, 1.0)]):
                later = calls.read_value() > 1.0
                return v1.cond(
                    tf.reduce_mean(x) > 5.0,
                    lambda: x * w,
                    lambda: v1.cond(later, lambda: x + w, lambda: x - w * 3.0),
                )

        y = v1.cond(tf.reduce_sum(x) > -100.0, outer, lambda: x)
        loss = tf.reduce_sum(y * y)
        return [v1.train.MomentumOptimizer(0.01, 0.9).minimize(loss), loss]

    compare(make, X, runs=3)


def test_what_a_branch_that_is_not_taken_assigns_stays():
    def make(x):
        calls = reference("calls", [], initializer=v1.zeros_initializer(), trainable=False)
        return v1.cond(
            tf.reduce_sum(x) > 1e6,
            lambda: tf.identity(v1.assign_add(calls, 1.0)),
            lambda: tf.constant(7.0),
        )

    assert compare(make, X).values() == {"calls": 0.0}


def loop(x):
    w = reference("w", [3, 3])
    i, y = v1.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(tf.matmul(y, w))), [0, x])
    return [i, y]


def resource_loop(x):
    w = v1.get_variable("w", [3, 3], use_resource=True)
    return v1.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.matmul(y, w)), [0, x])[1]


def nested_loop(x):
    def body(i, y):
        inner = v1.while_loop(lambda j, z: j < i, lambda j, z: (j + 1, z * 2.0 + 1.0), [0, y])
        return i + 1, v1.cond(i % 2 > 0, lambda: inner[1] - 3.0, lambda: inner[1])

    return v1.while_loop(lambda i, y: i < 4, body, [0, x])[1]


@pytest.mark.parametrize("make", [loop, resource_loop, nested_loop])
def test_loops(make):
    compare(make, X, runs=1)


def refused(make, match):
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        fetches = make(x)
    source = from_graph(graph)
    with pytest.raises(CaptureError, match=match):
        source.capture(fetches, {x: (4, 3)})


def test_what_cannot_be_converted_is_named():
    def growing(x):
        return v1.while_loop(
            lambda i, y: i < 3,
            lambda i, y: (i + 1, tf.concat([y, x], 0)),
            [0, x],
            shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, 3])],
        )[1]

    def growing_array(x):
        return tf.TensorArray(tf.float32, 0, dynamic_size=True).write(0, x).stack()

    def written_gradient(x):
        array = tf.TensorArray(tf.float32, 2).write(0, x)
        return array.grad("here").write(0, x).write(1, x).read(0)

    def joined(x):
        return tf.TensorArray(tf.float32, 1).write(0, x).concat()

    def of_two_shapes(x, rows=2):
        return v1.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: x[:rows])

    def effect(x):
        def draw():
            with tf.control_dependencies([v1.py_func(lambda: None, [], [])]):
                return x + 1.0

        return v1.cond(tf.reduce_sum(x) > 0, draw, lambda: x)

    refused(growing, r"Enter 'while/Enter_1' has the shape \(4, 3\) at first and \(8, 3\) then")
    refused(growing_array, "TensorArrayV3 'TensorArray' grows as it is written.*control_flow_v2")
    refused(written_gradient, "TensorArrayWriteV3 .* adds to a gradient array that is written")
    refused(joined, "TensorArrayConcatV3 .* has no form for tensor lists")
    refused(of_two_shapes, r"Merge 'cond/Merge' joins give tensors of two shapes")
    refused(lambda x: of_two_shapes(x, 1), r"\(4, 3\) and \(1, 3\)")
    refused(effect, "PyFunc .* stands in a branch of a tf.cond")
