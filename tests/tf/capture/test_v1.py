"""Graphs of tf.compat.v1, MetaGraphs and SavedModels run partitioned, with their own numbers."""

import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tfpar.spec import CaptureError, TfparError, format_spec
from tfpar.tf.capture import graph_sources
from tfpar.tf.graph_program import GraphProgram

v1 = tf.compat.v1
BATCH, FEATURES, HIDDEN, CLASSES = 8, 6, 12, 3


class Mlp:
    """A graph as one wrote them: placeholders, get_variable, Adam, Saver, summaries, asserts."""

    def __init__(self, optimizer=None):
        self.graph = tf.Graph()
        with self.graph.as_default():
            v1.set_random_seed(7)
            self.x = v1.placeholder(tf.float32, [None, FEATURES], name="x")
            self.y = v1.placeholder(tf.int32, [None], name="y")
            with v1.variable_scope("dense"):
                w = v1.get_variable("kernel", [FEATURES, HIDDEN], use_resource=True)
                b = v1.get_variable("bias", initializer=tf.zeros([HIDDEN]), use_resource=True)
            hidden = tf.nn.relu(tf.matmul(self.x, w) + b)
            v1.summary.histogram("hidden", hidden)
            with v1.variable_scope("head"):
                head = v1.get_variable("kernel", [HIDDEN, CLASSES], use_resource=True)
            logits = v1.check_numerics(tf.matmul(hidden, head), "logits")
            self.loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self.y, logits=logits),
                name="loss",
            )
            v1.summary.scalar("training", self.loss)
            step = v1.train.get_or_create_global_step()
            self.average = tf.train.ExponentialMovingAverage(0.9)
            with tf.control_dependencies([v1.assert_greater(self.loss, -1.0)]):
                optimizer = optimizer or v1.train.AdamOptimizer(0.05)
                update = optimizer.minimize(self.loss, global_step=step)
            with tf.control_dependencies([update]):
                self.train = tf.group(self.average.apply([w]), name="train")
            self.summaries = v1.summary.merge_all()
            self.saver = v1.train.Saver()
            self.init = v1.global_variables_initializer()
        rng = np.random.default_rng(0)
        self.feeds = {
            self.x: rng.normal(size=(BATCH, FEATURES)).astype("float32"),
            self.y: rng.integers(0, CLASSES, BATCH).astype("int32"),
        }

    def session(self):
        return v1.Session(graph=self.graph)

    def values(self, session):
        return {
            v.op.name: session.run(v)
            for v in self.graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)
        }


def assert_same(got, want):
    assert set(got) == set(want)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "constraints, spec",
    [
        ((), "R,R"),
        ((tap.shard("dense/kernel", dim=1, axis="model"),), "R,S(1)"),
        ((tap.shard("dense/kernel", dim=0, axis="model"),), "R,S(0)"),
    ],
    ids=["data", "column", "row"],
)
def test_training_equals_a_session(constraints, spec):
    mlp = Mlp()
    with mlp.session() as session:
        session.run(mlp.init)
        initial = mlp.values(session)
        losses = [session.run([mlp.train, mlp.loss], mlp.feeds)[1] for _ in range(3)]
        final = mlp.values(session)
    program = tap.GraphProgram(mlp.graph, [2, 2], constraints, planner=None)
    assert_same(program.values(), initial)
    for loss in losses:
        none, value = program.run([mlp.train, mlp.loss], mlp.feeds)
        assert none is None
        np.testing.assert_allclose(value, loss, rtol=1e-5)
    assert_same(program.values(), final)
    variables = program.variables
    assert format_spec(variables["dense/kernel"].layout[1]) == spec
    assert variables["dense/kernel/Adam"].layout == variables["dense/kernel"].layout


def test_trimmed_ops_are_listed_and_can_be_fetched():
    mlp = Mlp()
    source = graph_sources.from_graph(mlp.graph)
    assert {"dense/kernel/Assign", "head/kernel/Assign"} <= {
        op.name for op in source.removed["initialization"]
    }
    assert {op.type for op in source.removed["checkpoint"]} >= {"SaveV2", "RestoreV2"}
    step = source.capture(mlp.train, {mlp.x: (BATCH, FEATURES), mlp.y: (BATCH,)})
    kept = {op.type for op in step.graph.ops}
    assert not kept & {"NoOp", "SaveV2", "RestoreV2", "Assert", "If", "CheckNumerics"}
    assert not any("Summary" in op_type for op_type in kept)
    assert {op.type for op in source.removed["summary"]} >= {"ScalarSummary", "MergeSummary"}
    assert step.removed["assertion"]
    text = GraphProgram(source, [2], planner=None).run(mlp.summaries, mlp.feeds)
    assert {v.tag for v in v1.Summary.FromString(text).value} == {"hidden", "training"}


def test_checkpoints_are_those_of_the_saver(tmp_path):
    mlp = Mlp(v1.train.GradientDescentOptimizer(0.1))
    program = GraphProgram(
        graph_sources.from_graph(mlp.graph),
        tap.split([1, 4]),
        [tap.shard("dense/kernel", dim=1, axis="model")],
        planner=None,
    )
    with mlp.session() as session:
        session.run(mlp.init)
        session.run(mlp.train, mlp.feeds)
        program.restore(mlp.saver.save(session, str(tmp_path / "theirs"), global_step=1))
        assert_same(program.values(), mlp.values(session))
        session.run(mlp.train, mlp.feeds)
        program.run(mlp.train, mlp.feeds)
        ours = program.save(str(tmp_path / "deeper" / "ours"))
        expected = mlp.values(session)
        session.run(mlp.init)
        mlp.saver.restore(session, ours)
        assert_same(mlp.values(session), expected)
    assert tf.train.latest_checkpoint(str(tmp_path / "deeper")) == ours
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "other"),
        tensor_names=["a"],
        shape_and_slices=[""],
        tensors=[tf.zeros([1])],
    )
    with pytest.raises(TfparError, match="has no 'dense/bias'"):
        program.restore(str(tmp_path / "other"))


def test_meta_graph_by_names_and_any_batch(tmp_path):
    mlp = Mlp()
    with mlp.session() as session:
        session.run(mlp.init)
        path = mlp.saver.save(session, str(tmp_path / "model"))
        want = session.run(mlp.loss, mlp.feeds)
        small = {t: value[:3] for t, value in mlp.feeds.items()}
        want_small = session.run(mlp.loss, small)
        session.run(mlp.train, mlp.feeds)
        want_after = session.run(mlp.loss, small)
    source = graph_sources.from_meta_graph(path + ".meta")
    assert {n for n, v in source.variables.items() if v.trainable} == {
        "dense/kernel",
        "dense/bias",
        "head/kernel",
    }
    program = GraphProgram(source, [2, 2], planner=None)
    program.restore(path)
    x, y = mlp.feeds.values()
    np.testing.assert_allclose(program.run("loss:0", {"x": x, "y:0": y}), want, rtol=1e-5)
    got = program.run({"loss": "loss:0"}, {"x": x[:3], "y": y[:3]})
    np.testing.assert_allclose(got["loss"], want_small, rtol=1e-5)
    assert program.run("train", {"x": x, "y": y}) is None
    np.testing.assert_allclose(
        program.run("loss:0", {"x": x[:3], "y": y[:3]}), want_after, rtol=1e-5
    )


class Scaler(tf.Module):
    """Two variables of one name, a constant, a counter and a nested function."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.random.stateless_normal([4, 8], [1, 2]), name="w")
        self.b = tf.Variable(tf.ones([8]), name="w")
        self.calls = tf.Variable(0, trainable=False, name="calls")
        self.constant = tf.constant([2.0])

    @tf.function
    def layer(self, x):
        self.calls.assign_add(1)
        return tf.nn.relu(x @ self.w + self.b) * self.constant

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 4], tf.float32, name="x"),
            tf.TensorSpec([], tf.float32, name="k"),
        ]
    )
    def serve(self, x, k):
        return {"y": self.layer(x) * k, "calls": self.calls.read_value()}


def test_saved_model_signature(tmp_path):
    module = Scaler()
    tf.saved_model.save(module, str(tmp_path), signatures=module.serve)
    source = graph_sources.from_saved_model(str(tmp_path))
    split = [tap.shard("w", dim=1, axis="model")]
    program = GraphProgram(source, [2, 2], split, planner=None)
    for batch in (6, 5):
        x = np.random.default_rng(batch).normal(size=(batch, 4)).astype("float32")
        got = program.run(feeds={"x": x, "k": 3.0})
        want = module.serve(tf.constant(x), tf.constant(3.0))
        np.testing.assert_allclose(got["y"], want["y"], rtol=1e-5)
        assert got["calls"] == want["calls"].numpy()
    assert format_spec(source.variables["w"].layout[1]) == "R,S(1)"
    assert set(source.variables) == {"w", "w#2", "calls"}
    step = source.capture(source.results, {"x": (6, 4), "k": ()})
    assert all(t.is_static for op in step.graph.ops for t in op.outputs)
    with pytest.raises(CaptureError, match="no signature 'train'; it has 'serving_default'"):
        graph_sources.from_saved_model(str(tmp_path), "train")


def test_saved_model_of_version_1(tmp_path):
    mlp = Mlp()
    with mlp.session() as session:
        session.run(mlp.init)
        want = session.run(mlp.loss, mlp.feeds)
        v1.saved_model.simple_save(
            session, str(tmp_path / "saved"), {"images": mlp.x, "labels": mlp.y}, {"loss": mlp.loss}
        )
    program = GraphProgram(tmp_path / "saved", [2, 2], planner=None)
    x, y = mlp.feeds.values()
    got = program.run(feeds={"images": x, "labels": y})
    np.testing.assert_allclose(got["loss"], want, rtol=1e-5)


def test_effects_of_called_functions_run_in_order():
    graph = tf.Graph()
    with graph.as_default():
        total = v1.get_variable("total", initializer=1.0, use_resource=True)
        x = v1.placeholder(tf.float32, [], name="x")

        @tf.function
        def add(value):
            total.assign_add(value)
            return total.read_value()

        first = add(x)
        with tf.control_dependencies([first]):
            double = total.assign(total.read_value() * 2)
        with tf.control_dependencies([double]):
            last = add(x) + 0.0
    program = GraphProgram(graph, [2], planner=None)
    assert program.run([first, last], {x: 3.0}) == [4.0, 11.0]
    assert program.values() == {"total": 11.0}


def test_branches_with_static_shapes():
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        w = v1.get_variable("w", initializer=tf.ones([4, 4]), use_resource=True)
        y = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.matmul(x, w), lambda: x - 1.0)
    program = GraphProgram(graph, [2], planner=None)
    for value in (np.full((4, 4), 2.0), np.full((4, 4), -2.0)):
        want = value @ np.ones((4, 4)) if value.sum() > 0 else value - 1
        np.testing.assert_allclose(program.run(y, {x: value}), want)


def test_what_cannot_be_captured_is_named():
    mlp = Mlp()
    source = graph_sources.from_graph(mlp.graph)
    with pytest.raises(CaptureError, match="'los'. Did you mean 'loss'"):
        source.capture("los", {})
    with pytest.raises(CaptureError, match="need 'y', which is not fed"):
        source.capture(mlp.loss, {"x": (BATCH, FEATURES)})
    with pytest.raises(CaptureError, match="cannot be fed"):
        source.capture(mlp.loss, {"train": ()})
    with pytest.raises(CaptureError, match="cannot be fetched"):
        source.capture(3, {})
    with pytest.raises(TfparError, match="source is 3; it must be a tf.Graph, a MetaGraphDef"):
        GraphProgram(3)
    graph = tf.Graph()
    with graph.as_default():
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)
        found = table.lookup(tf.constant([1]))
        lost = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2], shared_name="lost")
        read = tf.raw_ops.ReadVariableOp(resource=lost, dtype=tf.float32)
    source = graph_sources.from_graph(graph)
    with pytest.raises(CaptureError, match="a table, an iterator"):
        source.capture(found, {})
    with pytest.raises(TfparError, match="'lost' has no value: the graph has no initialiser"):
        GraphProgram(source, [2], planner=None).run(read)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        v1.train.AdamOptimizer,
        lambda rate: v1.train.MomentumOptimizer(rate, 0.9),
        v1.train.FtrlOptimizer,
        v1.train.ProximalGradientDescentOptimizer,
    ],
    ids=["adam", "momentum", "ftrl", "proximal"],
)
def test_rows_of_a_split_vocabulary_are_updated_where_they_are(optimizer):
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(3)
        tokens = v1.placeholder(tf.int64, [None, 5], name="tokens")
        table = v1.get_variable("table", [21, 4], use_resource=True)
        pooled = tf.reduce_sum(tf.nn.embedding_lookup(table, tokens), 1)
        loss = tf.reduce_mean(tf.square(pooled - 1.0))
        train = optimizer(0.1).minimize(loss)
        init = v1.global_variables_initializer()
    feeds = {tokens: np.random.default_rng(0).integers(0, 21, (4, 5))}
    with v1.Session(graph=graph) as session:
        session.run(init)
        losses = [session.run([train, loss], feeds)[1] for _ in range(3)]
        final = {v.op.name: session.run(v) for v in graph.get_collection("variables")}
    program = GraphProgram(graph, [1, 4], [tap.shard("table", dim=0, axis="model")], planner=None)
    got = [program.run([train, loss], feeds)[1] for _ in range(3)]
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert_same(program.values(), final)
    slots = [v for name, v in program.variables.items() if name.startswith("table/")]
    assert all(slot.layout == program.variables["table"].layout for slot in slots)
