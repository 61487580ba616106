"""Gradients as the boundary between backward and update; capturing without the update, cheaply."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tfpar.compile import simplify_step
from tfpar.tf.capture.step import argument_specs
from tfpar.tf.keras.adapter import parallel_model
from tfpar.tf.keras.gradients import marked_gradients
from tfpar.tf.keras.initial_shapes import _OF_ANY_SHAPE, initial_shape
from tfpar.tf.keras.model import ParallelModel
from tfpar.tf.session import Session
from tfpar.tf.variables.creator import create_variable
from tfpar.tf.variables.states import Pending

rng = np.random.default_rng(0)
X = rng.integers(0, 7, (8, 3)).astype("int32")
Y = rng.integers(0, 4, 8).astype("int32")
SPECS = argument_specs(((tf.TensorSpec(X.shape, tf.int32), tf.TensorSpec(Y.shape, tf.int32)),))

WRITES = ("Assign", "ResourceApply", "ResourceScatter")


class TwoOptimizers(keras.Model):
    """The embedding learns by one optimizer, the rest by another."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(7, 5)
        self.head = keras.layers.Dense(4)
        self.own = keras.optimizers.Adam()

    def call(self, x):
        return self.head(tf.reduce_mean(self.embedding(x), 1))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        parts = self.embedding.trainable_variables, self.head.trainable_variables
        for optimizer, weights, gradients in zip(
            (self.own, self.optimizer), parts, tape.gradient(loss, parts), strict=True
        ):
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


def sequential():
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(7, 5),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2, seed=3),
            keras.layers.Dense(4),
        ]
    )


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))


def parallel(build=sequential, optimizer="adamw"):
    """A model in a session that has started no device."""
    keras.utils.set_random_seed(0)
    session = Session(tap.split([2]))
    with session.scope():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer() if callable(optimizer) else optimizer, loss, jit_compile=False)
    return model, ParallelModel(model, session)


def shapes(gradients):
    return [t.shape for g in gradients for t in g.tensors]


def tensors(captured):
    return [t for g in captured.gradients for t in g.tensors]


CASES = {
    "fit": (sequential, "adamw"),
    "two optimizers": (TwoOptimizers, "sgd"),
    "loss scaling": (sequential, scaled),
}


@pytest.mark.parametrize("case", CASES)
def test_what_enters_the_optimizer_is_marked(case):
    _, state = parallel(*CASES[case])
    captured = state.step("train").capture(SPECS)
    # The embedding's gradient is sparse: its values, and the rows they belong to.
    kernel = (15, 4) if case != "two optimizers" else (5, 4)
    assert shapes(captured.gradients) == [(24, 5), (24,), kernel, (4,)]
    assert [g.variable.rpartition("/")[2] for g in captured.gradients] == [
        "embeddings",
        "kernel",
        "bias",
    ]
    assert all(t.op in captured.graph.ops for t in tensors(captured))
    assert not set(tensors(captured)) & set(captured.graph.outputs)


def test_marks_survive_the_passes():
    _, state = parallel(optimizer=scaled)
    captured = state.step("train").capture(SPECS)
    before, num_outputs = shapes(captured.gradients), len(captured.graph.outputs)
    simplify_step(captured)
    assert shapes(captured.gradients) == before
    assert len(captured.graph.outputs) == num_outputs
    assert all(t.op in captured.graph.ops for t in tensors(captured))


@pytest.mark.parametrize("case", CASES)
def test_a_step_without_updates_writes_no_weight(case):
    model, state = parallel(*CASES[case])
    captured = state.capture_gradients(SPECS)
    assert shapes(captured.gradients) == [tuple(w.shape) for w in model.trainable_weights]
    weights = {id(w.value) for w in model.trainable_weights}
    handles = {
        v.handle
        for v, variable in zip(captured.graph.variables, captured.variables, strict=True)
        if id(variable) in weights
    }
    assert len(handles) == len(model.trainable_weights)
    assert not [
        op for op in captured.graph.ops if op.type.startswith(WRITES) and op.inputs[0] in handles
    ]
    assert not model.optimizer.built
    assert "devices" not in vars(state.session)
    assert all(isinstance(w.value.state, Pending) for w in model.trainable_weights)


def test_a_sparse_gradient_is_made_dense_where_nothing_updates():
    _, state = parallel()
    captured = state.capture_gradients(SPECS)
    simplify_step(captured)
    assert "UnsortedSegmentSum" in {op.type for op in captured.graph.ops}
    assert captured.gradients[0].values.op in captured.graph.ops


def test_a_step_that_trains_nothing_has_no_gradients():
    _, state = parallel()
    assert state.step("predict").capture(argument_specs((X,))).gradients == []


def test_gradients_of_a_branch_run_their_optimizer_as_ever():
    variable = keras.Variable(np.ones(3, "float32"))
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([variable])

    def step(flag):
        with marked_gradients(update=False):
            tf.cond(flag, lambda: optimizer.apply([tf.ones(3)]), lambda: None)

    tf.function(step, autograph=False)(tf.constant(True))
    np.testing.assert_array_equal(variable, [0.5, 0.5, 0.5])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_after_a_capture_without_updates(case):
    build, optimizer = CASES[case]

    def trained(capture: bool):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        with tap.auto_parallel([2]):
            model = build()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            chosen = optimizer() if callable(optimizer) else optimizer
            model.compile(chosen, loss, jit_compile=False)
        if capture:
            parallel_model(model).capture_gradients(SPECS)
        history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        return history["loss"], model.get_weights()

    (plain, weights), (captured, others) = trained(False), trained(True)
    np.testing.assert_array_equal(captured, plain)
    for a, b in zip(weights, others, strict=True):
        np.testing.assert_array_equal(a, b)


# --- what makes it cheap ---------------------------------------------------------


def initial_values(initializer, shape, dtype):
    """What Keras makes a weight's variable from."""
    found = []

    def keep(next_creator, **kwargs):
        found.append(kwargs["initial_value"])
        return next_creator(**kwargs)

    with tf.variable_creator_scope(keep):
        keras.Variable(initializer, shape=shape, dtype=dtype)
    return found[0]


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_that_are_read_off_are_those_that_are_made(shape, dtype):
    for cls in _OF_ANY_SHAPE:
        initial = initial_values(cls(), shape, dtype)
        value = initial()
        assert initial_shape(initial) == (value.shape, value.dtype)


def test_the_shapes_of_other_initial_values_are_traced():
    for initializer, shape in [("orthogonal", (2, 3)), ("identity", (2, 2))]:
        assert initial_shape(initial_values(initializer, shape, "float32")) is None
    assert initial_shape(initial_values("zeros", (2,), "int32")) is None
    assert initial_shape(lambda: tf.zeros(3)) is None


def test_variables_have_the_names_that_tensorflow_gives():
    def names():
        with tf.name_scope("outer/inner"):
            made = [tf.Variable([1.0], name="weight"), tf.Variable([1.0])]
        return [v.name for v in made]

    with tf.variable_creator_scope(create_variable):
        assert names() == ["outer/inner/weight:0", "outer/inner/Variable:0"]


def test_variables_that_come_later_are_found_by_name():
    model, state = parallel()
    state.capture_gradients(SPECS)
    captured = state.step("train").capture(SPECS)
    names = {v.name for v in captured.graph.variables}
    assert {v.path for v in model.optimizer.variables} <= names
