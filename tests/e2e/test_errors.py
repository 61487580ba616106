"""Bad input: an error that names the thing and the way out, and a model that is still usable."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar as tap
from tests.equivalence import op_by_op, train
from tfpar.spec import (
    CaptureError,
    SpecError,
    TfparError,
)
from tfpar.tf.keras import parallel_model

MESH = tap.split([2, 2])
COLUMN = [tap.shard("fc1/kernel", dim=1, axis="model")]
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(8, 6)).astype("float32"), rng.normal(size=(8, 2)).astype("float32")


def build(optimizer="sgd", loss="mse", **arguments):
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(10, "tanh", name="fc1"), layers.Dense(2, name="fc2")]
    )
    if optimizer is not None:
        model.compile(optimizer, loss, jit_compile=False, **arguments)
    return model


def parallel(constraints=COLUMN, mesh=MESH, make=build, **arguments):
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(mesh, constraints, **{"planner": None, **arguments}):
        return make()


def assert_usable(model, make=build, constraints=COLUMN, mesh=MESH):
    """The model still has the weights it was made with, and trains once nothing is wrong."""
    plain = train(op_by_op(make), (X, Y))
    for got, want in zip(model.get_weights(), plain.start, strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(model(X), make_with(plain.start, make)(X), rtol=1e-5, atol=1e-6)
    tap.parallelize(model, mesh, constraints, planner=None)
    if not model.compiled:
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    for got, want in zip(model.get_weights(), plain.weights, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def make_with(weights, make=build):
    model = make()
    model.set_weights(weights)
    return model


# --- meshes and constraints ------------------------------------------------------------


def test_meshes_that_cannot_be():
    plain = build()
    for mesh, sign in (
        ([0], "size 0"),
        ([-2, 2], "size -2"),
        ([], "at least one axis"),
        ([2.5], "size 2.5"),
        (None, "needs a mesh"),
        ({"": 2}, "non-empty"),
        ([True], "size True"),
        ("4", "4"),
    ):
        with pytest.raises(TfparError, match=sign):
            with tap.auto_parallel(mesh):
                build()
        assert parallel_model(build(None)) is None, "no block is left open"
        with pytest.raises(TfparError, match=sign):
            tap.parallelize(plain, mesh)
    plain.fit(X, Y, verbose=0)
    assert parallel_model(plain) is None


@pytest.mark.slow
def test_constraints_that_cannot_hold():
    for constraints, signs in (
        ([tap.shard("fc_1/kernel", 1, "model")], ["'fc_1/kernel'", "fc1/kernel"]),
        ([tap.shard("fc1/kernel", 2, "model")], ["fc1/kernel", "(6, 10)", "dim"]),
        ([*COLUMN, tap.shard("fc1/k.*", 0, "model")], ["contradict", "fc1/kernel", "'model'"]),
        ([tap.shard("fc1/kernel", 1, "model", stride=4)], ["fc1/kernel", "stride"]),
        ([*COLUMN, tap.shard_output("fc9", 0, "model")], ["fc9", "fc2"]),
    ):
        model = parallel(constraints)
        with pytest.raises(SpecError) as error:
            model.fit(X, Y, batch_size=8, verbose=0)
        assert all(sign in str(error.value) for sign in signs), error.value
    assert_usable(model)


def test_constraint_on_an_unknown_axis():
    with pytest.raises(SpecError, match="no axis 'modle'.*'data', 'model'"):
        model = parallel([tap.shard("fc1/kernel", 1, "modle")])
        model.fit(X, Y, verbose=0)
    model = build()
    with pytest.raises(SpecError, match="no axis 'modle'"):
        tap.parallelize(model, MESH, [tap.shard("fc1/kernel", 1, "modle")])
    model.fit(X, Y, verbose=0)


# --- steps that cannot be captured -----------------------------------------------------


class Peeking(layers.Layer):
    """Looks at values in Python; only if told to."""

    def __init__(self, how, **kwargs):
        super().__init__(**kwargs)
        self.how = how

    def call(self, x):
        if self.how == "if" and ops.sum(x) > 0:
            return x
        if self.how == "numpy":
            return x * float(x.numpy().max())
        if self.how == "float":
            return x * float(ops.max(x))
        if self.how == "asarray":
            return x * np.asarray(x).max()
        if self.how == "range":
            return x + len(range(ops.cast(ops.max(x), "int32")))
        return x

    def compute_output_shape(self, shape):
        return shape

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


@pytest.mark.slow
def test_eager_only_python_in_a_layer():
    def make():
        x = keras.Input((6,))
        h = layers.Dense(10, "tanh", name="fc1")(x)
        model = keras.Model(x, layers.Dense(2, name="fc2")(Peeking(None, name="peeking")(h)))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    model = parallel(make=make)
    for how in ("if", "numpy", "float", "asarray", "range"):
        model.get_layer("peeking").how = how
        for use in (model.fit, model.evaluate):
            with pytest.raises(CaptureError) as error:
                use(X, Y, batch_size=8, verbose=0)
            text = str(error.value)
            assert "test_errors.py:" in text and "keras.ops" in text, text
    with pytest.raises(CaptureError, match="test_errors.py"):
        model.predict(X, verbose=0)
    assert model(X).shape == (8, 2), "eager use goes on"
    model.get_layer("peeking").how = None
    assert_usable(model)


@pytest.mark.slow
def test_eager_only_python_in_a_train_step():
    class Curious(keras.Model):
        peek = True

        def train_step(self, data):
            logs = super().train_step(data)
            if self.peek:
                print(logs["loss"].numpy())
            return logs

    def make():
        x = keras.Input((6,))
        h = layers.Dense(10, "tanh", name="fc1")(x)
        model = Curious(x, layers.Dense(2, name="fc2")(h))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    model = parallel(make=make)
    with pytest.raises(CaptureError, match="test_errors.py:.*numpy"):
        model.fit(X, Y, batch_size=8, verbose=0)
    Curious.peek = False
    assert_usable(model)


def test_eager_only_python_in_a_function():
    with tap.auto_parallel(MESH):
        weight = tf.Variable(tf.ones([6, 2]))

        @tap.function
        def step(x):
            return tf.reduce_sum(x @ weight) * float(x.numpy().max())

    with pytest.raises(CaptureError, match=r"test_errors.py:\d+: .*numpy"):
        step(X)
    np.testing.assert_array_equal(weight.numpy(), np.ones((6, 2)))


@pytest.mark.slow
def test_errors_of_the_step_itself_come_through():
    class Broken(layers.Layer):
        broken = True

        def call(self, x):
            if self.broken:
                raise ValueError("my own mistake")
            return x

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    def make():
        x = keras.Input((6,))
        h = Broken()(layers.Dense(10, "tanh", name="fc1")(x))
        model = keras.Model(x, layers.Dense(2, name="fc2")(h))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    model = parallel(make=make)
    with pytest.raises(ValueError, match="my own mistake"):
        model.fit(X, Y, batch_size=8, verbose=0)
    Broken.broken = False
    assert_usable(model)


@pytest.mark.slow
def test_errors_while_running_come_through():
    """A label out of range, on one rank: TensorFlow's own error; then training goes on."""

    def make():
        return build(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    model = parallel(make=make)
    labels = np.zeros(8, "int32")
    bad = labels.copy()
    bad[7] = 5
    plain = make_with(model.get_weights(), make)
    runs = []
    for m in (model, plain):
        m.fit(X, labels, batch_size=8, verbose=0)
        try:
            m.fit(X, bad, batch_size=8, verbose=0)
        except tf.errors.InvalidArgumentError as error:
            runs.append("label" in str(error).lower())
        m.fit(X, labels, batch_size=8, verbose=0)
    assert runs in ([True, True], []), "both fail, or (NaN losses on GPUs) none"


# --- Keras's own checks ----------------------------------------------------------------


@pytest.mark.slow
def test_fit_without_compile():
    model = parallel(make=lambda: build(None))
    with pytest.raises(ValueError, match="compile"):
        model.fit(X, Y, verbose=0)
    assert_usable(model, make=build)


@pytest.mark.slow
def test_without_an_optimizer():
    """Keras takes None and then trains nothing; so does the mesh."""

    def make():
        model = build(None)
        model.compile(optimizer=None, loss="mse", jit_compile=False)
        return model

    errors = []
    for model in (parallel(make=make), make()):
        try:
            model.fit(X, Y, batch_size=8, verbose=0)
            errors.append(None)
        except Exception as error:
            errors.append(type(error))
        model.evaluate(X, Y, verbose=0)
    assert errors[0] == errors[1]


def test_a_plain_model_is_told_how_to_become_parallel():
    model = build()
    for ask in (tap.plan_of, tap.coverage, lambda m: tap.verify(m, X, Y)):
        with pytest.raises(TfparError, match="auto_parallel|not parallel"):
            ask(model)
    with pytest.raises(TfparError, match="no plan yet.*fit"):
        tap.plan_of(parallel())
    with pytest.raises(TfparError, match="not compiled"):
        tap.verify(parallel(make=lambda: build(None)), X, Y)


# --- dtypes and resources --------------------------------------------------------------


@pytest.mark.slow
def test_lookup_tables_and_strings_run_once_for_all():
    def make():
        words = keras.Input((2,), dtype="string")
        numbers = keras.Input((2,), dtype="int64")
        ids = layers.StringLookup(vocabulary=["a", "b", "c"])(words)
        more = layers.IntegerLookup(vocabulary=[3, 5, 8], num_oov_indices=2)(numbers)
        hashed = layers.Hashing(4)(words)
        bins = layers.Discretization(bin_boundaries=[2.0, 4.0])(numbers)
        table = layers.Embedding(5, 5)
        h = sum(layers.Flatten()(table(t)) for t in (ids, more, hashed, bins))
        h = h + layers.CategoryEncoding(10, "multi_hot")(numbers)
        model = keras.Model([words, numbers], layers.Dense(2, name="fc1")(h))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    text = tf.constant([["a", "b"], ["b", "x"], ["c", "a"], ["y", "b"]] * 2)
    data = tf.data.Dataset.from_tensor_slices(((text, rng.integers(0, 9, (8, 2))), Y)).batch(4)
    runs = []
    for build_model in (op_by_op(make), lambda: parallel(make=make)):
        keras.utils.set_random_seed(7)
        model = build_model()
        model.fit(data, epochs=2, verbose=0)
        runs.append(model.get_weights())
    for got, want in zip(*runs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_resource_of_another_kind():
    """A queue or a mutable table in the step: said, with the way out."""

    class Counting(layers.Layer):
        table = None

        def call(self, x):
            if self.table is None:
                return x
            self.table.insert(tf.constant([1]), tf.constant([2.0]))
            return x * tf.reshape(self.table.lookup(tf.constant([1])), [1])

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    def make():
        x = keras.Input((6,))
        h = Counting()(layers.Dense(10, "tanh", name="fc1")(x))
        model = keras.Model(x, layers.Dense(2, name="fc2")(h))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    model = parallel(make=make)
    Counting.table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 1.0)
    with pytest.raises(CaptureError, match="MutableHashTable.*tf.data"):
        model.fit(X, Y, batch_size=8, verbose=0)
    Counting.table = None
    assert_usable(model)


def test_a_variable_of_strings():
    with tap.auto_parallel(MESH):
        text = tf.Variable(["a", "b"])
        weight = tf.Variable(tf.ones([6, 2]))

        @tap.function
        def step(x):
            return x @ weight, text.read_value()

        out, read = step(X)
    np.testing.assert_allclose(out, X @ np.ones((6, 2)), rtol=1e-5)
    assert read.numpy().tolist() == [b"a", b"b"]


# --- the runtime -----------------------------------------------------------------------


@pytest.mark.slow
def test_strict_refuses_ops_without_a_rule():
    class Odd(layers.Layer):
        def call(self, x):
            return x + tf.reshape(tf.numpy_function(lambda a: a * 0, [x], tf.float32), tf.shape(x))

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    def make():
        x = keras.Input((6,))
        h = Odd()(layers.Dense(10, "tanh", name="fc1")(x))
        model = keras.Model(x, layers.Dense(2, name="fc2")(h))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    model = parallel(make=make, strict=True)
    with pytest.raises(TfparError, match="No op rule for PyFunc.*strict=True.*register_rule"):
        model.fit(X, Y, batch_size=8, verbose=0)
    assert_usable(model, make=make)


def test_another_backend_of_keras(monkeypatch):
    model = build()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(TfparError, match="'jax'.*KERAS_BACKEND=tensorflow"):
        with tap.auto_parallel(MESH):
            pass
    with pytest.raises(TfparError, match="KERAS_BACKEND"):
        tap.parallelize(model, MESH)
    monkeypatch.undo()
    model.fit(X, Y, verbose=0)
    assert parallel_model(model) is None and parallel_model(build()) is None


@pytest.mark.slow
def test_more_ranks_than_devices_share_them(caplog):
    with caplog.at_level(logging.INFO, "tfpar"):
        model = parallel((), tap.split([6]))
    assert "6 ranks share 4 logical CPU device(s)" in caplog.text
    assert_usable(model, constraints=(), mesh=tap.split([6]))


@pytest.mark.slow
def test_the_check_can_run_on_weights_that_are_not_numbers():
    model = parallel()
    model.set_weights([np.full_like(w, np.nan) for w in model.get_weights()])
    model.fit(X, Y, batch_size=8, verbose=0)
    assert np.isnan(model.get_weights()[0]).all()


def test_coverage_without_shapes():
    class Open(keras.Model):
        def __init__(self):
            super().__init__()
            self.fc1 = layers.Dense(2, name="fc1")

        def call(self, x):
            return self.fc1(x)

    with tap.auto_parallel(MESH):
        model = Open()
        model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(TfparError, match="tap.coverage\\(model, x, y\\)"):
        tap.coverage(model)
    assert tap.coverage(model, X, Y)
    model.fit(X, Y, batch_size=8, verbose=0)


def test_function_outside_of_a_block():
    with pytest.raises(TfparError, match="auto_parallel"):
        tap.function(lambda x: x)
