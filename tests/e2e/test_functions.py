"""`tap.function` is called as a `tf.function` is, and gives what it gives."""

from __future__ import annotations

import gc
import weakref
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tfpar.spec import CaptureError, TfparError

X = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
Y = np.ones((10, 3), "float32")


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)  # the last one is smaller


def on_mesh(make, **options):
    """What `make` gives under `tap.function` in a block, and under `tf.function`."""
    with tap.auto_parallel([2], planner=None):
        parallel = make(lambda f=None, **given: tap.function(f, **options, **given))
    return parallel, make(lambda f=None, **given: tf.function(f, **options, **given))


def same(got, want):
    tf.nest.assert_same_structure(got, want, expand_composites=True)
    for a, b in zip(
        tf.nest.flatten(got, expand_composites=True),
        tf.nest.flatten(want, expand_composites=True),
        strict=True,
    ):
        if b is None:
            assert a is None
            continue
        assert a.dtype == b.dtype
        if b.dtype == tf.string:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Pair(NamedTuple):
    first: object
    second: object


def test_arguments_of_every_kind():
    def make(function):
        traces = []

        @function
        def f(x, n=2, *rest, flag: bool = False, name="a", **more):
            traces.append(None)
            if flag:
                x = -x
            scaled = x["x"] * n if isinstance(x, dict) else x * n
            out = {"y": scaled, "none": None, "number": 3, "text": name, "rest": rest}
            return Pair(out, [more.get("k"), tf.reduce_sum(scaled)])

        return f, traces

    (parallel, traces), (plain, plainly) = on_mesh(make)
    ones = tf.ones([4])
    calls = [
        lambda f: f(ones),
        lambda f: f(ones, 2),  # a default that is given is no other trace
        lambda f: f(x=ones, n=3.0, flag=True),
        lambda f: f(ones, 3, flag=True),  # 3 and 3.0 are
        lambda f: f({"x": np.ones(4, "float32")}, k=tf.constant(2.0)),
        lambda f: f(ones, 2, tf.constant(1), ones, name="b"),
        lambda f: f(ones, tf.constant(2.0)),
        lambda f: f(ones, tf.constant(5.0)),  # another tensor is not
    ]
    for call in calls:
        same(call(parallel), call(plain))
    assert len(traces) == 6
    assert len(plainly) == 5  # takes 3 for 3.0, which give other dtypes


def test_tensors_of_several_parts_and_strings():
    @tf.function
    def plain(ragged, sparse, slices, text):
        dense = tf.sparse.to_dense(sparse) * 2.0
        rows = tf.convert_to_tensor(slices)
        return ragged * 2, tf.reduce_sum(ragged, 1), dense, rows, tf.strings.join([text, "!"])

    with tap.auto_parallel([2], planner=None):
        parallel = tap.function(plain)
    sparse = tf.sparse.from_dense([[0.0, 1.0], [2.0, 0.0]])
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([2, 2]))
    for rows in ([[1, 2], [3]], [[1, 2], [3, 4, 5]]):
        arguments = tf.ragged.constant(rows), sparse, slices, tf.constant(["a", "b"])
        same(parallel(*arguments), plain(*arguments))
    assert len(parallel.executables) == 1  # how many values there are is not in the shape


class Counter(tf.Module):
    def __init__(self, start):
        super().__init__()
        self.total = tf.Variable(start)
        self.traced = 0

    def add(self, x, *, times=1.0):
        """Add up."""
        self.traced += 1
        self.total.assign_add(tf.reduce_sum(x) * times)
        return self.total.read_value()


def test_a_method_binds_its_instance():
    with tap.auto_parallel([2], planner=None):

        class Parallel(Counter):
            add = tap.function(Counter.add)

        one, other = Parallel(1.0), Parallel(10.0)
    x = tf.ones([4])
    got = [one.add(x), one.add(x), other.add(x, times=2.0), one.add(x)]
    assert [float(v) for v in got] == [5.0, 9.0, 18.0, 13.0]
    assert (one.traced, other.traced) == (1, 1)
    assert Parallel.add(one, x) == 17.0
    assert one.add is one.add
    assert tap.plan_of(one.add).mesh.size == 2
    with pytest.raises(TfparError, match="'add' has no plan yet"):
        tap.plan_of(Parallel(0.0).add)
    assert Parallel.add.__doc__ == "Add up."


def test_the_steps_of_a_method_do_not_keep_its_instance():
    with tap.auto_parallel([2], planner=None):

        class Parallel(Counter):
            add = tap.function(Counter.add)

    def used():
        instance = Parallel(1.0)
        instance.add(tf.ones([4]))
        return weakref.ref(instance)

    gone = used()
    gc.collect()
    assert gone() is None


def test_input_signature_converts_and_refuses():
    with tap.auto_parallel([2], planner=None):

        @tap.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.int32)])
        def f(x, n, more=1.0):
            return x * tf.cast(n, x.dtype) * more

    same(f([[1, 2]], 3), tf.constant([[3.0, 6.0]]))
    same(f(np.ones((3, 2)), n=2), 2 * tf.ones([3, 2]))
    with pytest.raises(TfparError, match=r"'x' of 'f' is float32 of shape \(2, 3\).*None, 2"):
        f(np.ones((2, 3)), 1)
    with pytest.raises(TfparError, match="'n' of 'f' cannot be converted"):
        f(np.ones((2, 2)), "two")
    with pytest.raises(TypeError, match=r"f\(\): missing a required argument: 'n'"):
        f([[1.0, 2.0]])
    with tap.auto_parallel([2]), pytest.raises(TfparError, match="2 specs.*1 parameter"):
        tap.function(lambda x: x, input_signature=[tf.TensorSpec([])] * 2)(1.0)


def test_a_concrete_function():
    with tap.auto_parallel([2], planner=None):
        f = tap.function(lambda x, n=2: x * n)
    step = f.get_concrete_function(tf.TensorSpec([4]), n=3)
    same(step(tf.ones([4])), 3 * tf.ones([4]))
    with pytest.raises(TfparError, match="was compiled for"):
        step(tf.ones([5]))
    with pytest.raises(TfparError, match="static shapes. Give the whole shape"):
        f.get_concrete_function(tf.TensorSpec([None]))


def test_what_a_step_cannot_be_given_is_named():
    with tap.auto_parallel([2], planner=None):
        f = tap.function(lambda x: x)
        with pytest.raises(TfparError, match="cannot have reduce_retracing=True"):
            tap.function(lambda x: x, reduce_retracing=True)
    with pytest.raises(TfparError, match="'<lambda>' is a set, which is neither a tensor nor"):
        f({1, 2})


def test_many_python_values_are_reported(caplog):
    with tap.auto_parallel([2], planner=None):
        f = tap.function(lambda x, n: x * n)
    for n in range(8):
        f(tf.ones([2]), n)
    assert "<lambda> is traced and compiled for the 8th" in caplog.text


def test_traces_share_the_plan_of_the_one_that_trains(capfd):
    with tap.auto_parallel([2], planner="tap", cluster="v100-ethernet"):
        weight = tf.Variable(np.ones((4, 3), "float32"))

        @tap.function
        def step(x, training):
            if not training:
                return tf.reduce_sum(x @ weight)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weight))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

    step(X, training=False)
    alone = tap.plan_of(step)
    step(X, training=True)
    trained = tap.plan_of(step)
    for training in (False, True):
        step(X, training=training)
        assert tap.plan_of(step).fingerprint == trained.fingerprint != alone.fingerprint
    assert "has changed" not in "".join(capfd.readouterr())


# --- data ----------------------------------------------------------------------------


def training(function):
    """A whole epoch in one function, with state of all kinds carried round."""
    weight = keras.Variable(np.ones((4, 3), "float32"))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build([weight])

    @function
    def epoch(data, scale):
        total, count, loss = 0.0, 0, tf.constant(0.0)
        factor = tf.convert_to_tensor(scale) * 2.0
        for x, y in data:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weight.value - y)) * factor
            optimizer.apply(tape.gradient(loss, [weight.value]), [weight])
            total += loss
            count += 1
        return total / tf.cast(count, tf.float32), loss, count

    return epoch, weight


@pytest.mark.slow
def test_a_loop_over_a_dataset_trains_batch_by_batch():
    (epoch, weight), (plain, wanted) = on_mesh(training)
    for scale in (1.0, 1.0, tf.constant(0.5)):  # what the loop reads may change between calls
        same(epoch(batches(), scale), plain(batches(), scale))
    np.testing.assert_allclose(weight.numpy(), wanted.numpy(), rtol=1e-5)
    same(epoch(iter(batches()), 1.0), plain(iter(batches()), 1.0))
    sizes = {tuple(e.captured.graph.inputs[0].shape) for e in epoch.executables}
    assert sizes == {(4, 4), (2, 4)}
    assert len(epoch.executables) <= 4  # two sizes; Python's first total, and a tensor's


def test_a_loop_that_ends_early():
    def make(function):
        @function
        def f(data):
            total, last = 0, tf.constant(0, tf.int64)
            for i, x in enumerate(data):
                last = i
                if total > 5:
                    break
                total += tf.cast(tf.reduce_sum(x), tf.int32)
            return total, last

        return f

    parallel, plain = on_mesh(make)
    data = tf.data.Dataset.range(100).batch(2)
    same(parallel(data), plain(data))
    same(parallel(data.take(0)), plain(data.take(0)))


def test_elements_taken_with_next_are_fed_to_one_step():
    def make(function):
        @function
        def f(iterator, k):
            x, y = next(iterator)
            other, _ = iterator.get_next()
            return (tf.reduce_sum(x) + tf.reduce_sum(other)) * k, y

        return f

    parallel, plain = on_mesh(make)
    ours, theirs = iter(batches().repeat(3)), iter(batches().repeat(3))
    for _ in range(4):
        same(parallel(ours, 2.0), plain(theirs, 2.0))
    for function, iterator in ((parallel, ours), (plain, theirs)):
        with pytest.raises(tf.errors.OutOfRangeError):
            function(iterator, 2.0)


def test_an_element_before_the_loop_over_the_rest():
    def make(function):
        @function
        def f(iterator):
            first, _ = next(iterator)
            total = tf.reduce_sum(first) * 10.0
            for x, _ in iterator:
                total += tf.reduce_sum(x)
            return total

        return f

    parallel, plain = on_mesh(make)
    same(parallel(iter(batches())), plain(iter(batches())))


def test_data_that_cannot_be_read_in_a_step(caplog):
    with tap.auto_parallel([2], planner=None):

        @tap.function
        def inside(iterator):
            total = tf.constant(0.0)
            for _ in tf.range(2):
                total += tf.reduce_sum(next(iterator)[0])
            return total

        @tap.function
        def both(first, second):
            other, total = iter(second), tf.constant(0.0)
            for x, _ in first:
                total += tf.reduce_sum(x - next(other)[0])
            return total

        @tap.function
        def kept(data):
            losses = []
            for x, _ in data:
                losses.append(tf.reduce_sum(x))
            return losses

        plainly = tap.function(lambda data: [x for x, _ in data][0], autograph=False)
    with pytest.raises(CaptureError, match="in a loop or a branch on tensors"):
        inside(iter(batches()))
    with pytest.raises(CaptureError, match="zip"):
        both(batches(), batches())
    with pytest.raises(CaptureError, match="'kept' changes 'losses' in place"):
        kept(batches())
    np.testing.assert_allclose(plainly(batches()), X[:4])
    assert "it ran on one device" in caplog.text


# --- ragged batches, SavedModels -------------------------------------------------------


class Bag(keras.Model):
    """The mean of the embeddings of a ragged list of tokens."""

    def __init__(self):
        super().__init__()
        self.embeddings = self.add_weight(shape=(20, 8), name="embeddings")
        self.head = keras.layers.Dense(3)

    def call(self, tokens):
        found = tf.ragged.map_flat_values(lambda at: tf.gather(self.embeddings, at), tokens)
        return self.head(tf.reduce_mean(found, 1))


@pytest.mark.slow
def test_ragged_batches_train_as_on_one_device():
    rng = np.random.default_rng(0)
    rows = [list(rng.integers(0, 20, rng.integers(1, 6))) for _ in range(10)]
    x, y = tf.ragged.constant(rows, dtype=tf.int64), rng.integers(0, 3, 10)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)

    def train():
        keras.utils.set_random_seed(1)
        model = Bag()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss, jit_compile=False)
        return model

    def results(model):
        losses = model.fit(data, epochs=2, verbose=0).history["loss"]
        told = data.map(lambda x, _: x)
        return [losses, model.evaluate(data, verbose=0), model.predict(told, verbose=0)]

    with tap.auto_parallel([2], planner=None):
        parallel = train()
    for got, want in zip(results(parallel), results(train()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
