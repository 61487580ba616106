"""The roles of a captured step's ops and tensors: phases, what is deferrable, what is kept."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tests.partitioned import trace
from tfpar.compile import prepare_step
from tfpar.ir import BACKWARD, FORWARD, UPDATE, Roles
from tfpar.propagation import prepare
from tfpar.tf.capture import argument_specs
from tfpar.tf.interop import convert_func_graph
from tfpar.tf.keras import parallel_model


class Tied(keras.Model):
    """An embedding that is the head too, with a hidden layer between."""

    def __init__(self):
        super().__init__(name="tied")
        self.embedding = keras.layers.Embedding(7, 5, name="embedding")
        self.hidden = keras.layers.Dense(5, activation="relu", name="hidden")

    def build(self, shape):
        self.embedding.build(shape)
        self.hidden.build((*shape, 5))
        self.built = True

    def call(self, ids):
        table = tf.one_hot(ids, 7) @ tf.convert_to_tensor(self.embedding.embeddings)
        return tf.einsum("bd,vd->bv", self.hidden(table), self.embedding.embeddings)


def mlp():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(10, "relu", name="fc1"),
            keras.layers.Dense(4, name="fc2"),
        ],
        name="mlp",
    )


X, IDS = np.zeros((8, 6), "float32"), np.zeros(8, "int32")


def captured_step(build, x, y, optimizer="adam", loss="mse"):
    keras.utils.clear_session(free_memory=False)
    with tap.auto_parallel(tap.split([2])):
        model = build()
        if not model.built:
            model.build(x.shape)
        model.compile(optimizer, loss, jit_compile=False)
    step = parallel_model(model).step("train").capture(argument_specs(((x, y),)))
    prepare_step(step)
    return step


@functools.cache
def mlp_step():
    return captured_step(mlp, X, np.zeros((8, 4), "float32"))


def marks(step):
    return [t for g in step.gradients for t in g.tensors]


def roles_of(step, marked):
    return Roles.of(step.graph, marks(step) if marked else ())


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
def test_phases_of_a_step(marked):
    step = mlp_step()
    phase = roles_of(step, marked).phase
    products = [phase[op] for op in step.graph.ops if op.type == "MatMul"]
    # fc1, fc2; then dW2 and dX2, dW1 (nobody needs dX1).
    assert products == [FORWARD] * 2 + [BACKWARD] * 3
    weights = {v.handle for v in step.graph.variables if v.trainable}
    writes = [op for op in step.graph.ops if "Assign" in op.type and op.inputs[0] in weights]
    assert len(writes) == 4 and {phase[op] for op in writes} == {UPDATE}
    for op in step.graph.ops:
        assert all(phase[t.op] <= phase[op] for t in op.inputs)
    assert all(phase[t.op] == BACKWARD for t in marks(step))


def test_the_optimizer_is_the_update_where_gradients_are_marked():
    step = mlp_step()
    phase = roles_of(step, True).phase
    marked = set(marks(step))
    for op in step.graph.ops:
        if any(t in marked for t in op.inputs):
            assert phase[op] == UPDATE, op


def norm():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(4),
        ]
    )


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
def test_a_gradient_that_others_are_computed_from_is_waited_for(marked):
    """That of BatchNorm's offset is part of the mean's, and so of all that is before."""
    step = captured_step(norm, X, np.zeros((8, 4), "float32"), "sgd")
    roles = roles_of(step, marked)
    consumers = step.graph.consumers()
    for op in step.graph.ops:
        if op.name.startswith("gradient_tape/"):
            assert roles.phase[op] == BACKWARD, op
    going_on = [t for t in marks(step) if any(roles.phase[r] == BACKWARD for r in consumers[t])]
    assert {t.shape for t in going_on} == {(5,)}
    assert not roles.deferrable & set(going_on)


def test_the_rows_of_a_sparse_gradient_are_added_up_before_the_update():
    def build():
        return keras.Sequential(
            [keras.Input((), dtype="int32"), keras.layers.Embedding(7, 4, name="embedding")]
        )

    step = captured_step(build, IDS, np.zeros((8, 4), "float32"))
    roles = roles_of(step, True)
    # Adam adds up the squares of the rows too.
    sums = [op for op in step.graph.ops if op.type == "UnsortedSegmentSum"]
    (total,) = (op.outputs[0] for op in sums if op.inputs[0] in marks(step))
    assert roles.phase[total.op] == BACKWARD and total in roles.deferrable
    assert {roles.phase[r] for r in step.graph.consumers()[total]} == {UPDATE}


def test_a_metric_is_forward():
    step = mlp_step()
    phase = roles_of(step, True).phase
    total = next(v for v in step.graph.variables if v.name.endswith("loss/total"))
    writes = [op for op in step.graph.ops if "Assign" in op.type and total.handle in op.inputs]
    assert writes and {phase[op] for op in writes} == {FORWARD}


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
def test_gradients_of_weights_are_deferrable_and_those_of_activations_not(marked):
    step = mlp_step()
    roles = roles_of(step, marked)
    backward = [op for op in step.graph.ops if op.type == "MatMul"][2:]
    deferrable = {op.outputs[0].shape: op.outputs[0] in roles.deferrable for op in backward}
    assert deferrable == {(10, 4): True, (8, 10): False, (6, 10): True}
    assert set(marks(step)) <= roles.deferrable
    assert not any(roles.phase[t.op] != BACKWARD for t in roles.deferrable)


def test_a_tied_weight_s_two_gradients_and_their_sum_are_deferrable():
    step = captured_step(
        Tied, IDS, IDS, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    for marked in (True, False):
        roles = roles_of(step, marked)
        (total,) = (t for t in marks(step) if t.shape == (7, 5))
        assert total.op.type in ("AddN", "AddV2"), "the sum of both uses"
        assert total in roles.deferrable
        assert all(t in roles.deferrable for t in total.op.inputs)
        inner = [
            t
            for op in step.graph.ops
            for t in op.outputs
            if roles.phase[op] == BACKWARD and t.shape == (8, 5)
        ]
        assert inner and not roles.deferrable & set(inner)


def test_kept_is_what_the_backward_pass_reads():
    step = mlp_step()
    roles = roles_of(step, True)
    kept = {(t.op.type, t.shape) for t in roles.activations if len(t.shape) == 2}
    # x for dW1, relu(h) for dW2 and its own gradient, W2 for dX2; neither x W1 nor its sum.
    assert ("Relu", (8, 10)) in kept and ("ReadVariableOp", (10, 4)) in kept
    assert not {s for kind, s in kept if kind in ("MatMul", "BiasAdd", "AddV2")} & {(8, 10)}
    assert all(roles.phase[t.op] == FORWARD for t in roles.activations)


def test_what_is_read_by_another_name_is_kept_itself():
    def step(x, w):
        h = tf.nn.tanh(x)
        return tf.gradients(tf.matmul(tf.reshape(h, (4, 6)), w), [w])

    graph = convert_func_graph(trace(step, [np.ones((2, 2, 6)), np.ones((6, 3))]).graph)
    prepare(graph)
    roles = Roles.of(graph)
    assert {t.op.type for t in roles.activations} >= {"Tanh", "Reshape"}
    sizes_only = [op.outputs[0] for op in graph.ops if op.type == "MatMul"][:1]
    assert not roles.activations & set(sizes_only)


def test_a_step_without_gradients_is_forward():
    graph = convert_func_graph(trace(tf.matmul, [np.ones((2, 3)), np.ones((3, 4))]).graph)
    roles = Roles.of(graph)
    assert set(roles.phase.values()) == {FORWARD}
    assert not roles.activations and not roles.deferrable
