"""Models of many kinds in stages, and steps of one's own, with the numbers of one device."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.e2e.pipeline_models import CASES, SAMPLES
from tests.e2e.test_mixed_precision import numbers, perceptron, policy
from tests.e2e.test_models import Gan
from tests.e2e.test_patterns import MEGATRON
from tests.e2e.test_pipelines import piped
from tests.e2e.test_training_steps import MODELS
from tests.equivalence import (
    Trained,
    assert_equivalent,
    assert_same,
    op_by_op,
    traced,
    train,
    without_graph_optimizers,
)
from tests.one_epoch import Samples

rng = np.random.default_rng(0)


SCHEDULES = ("accumulation", "gpipe", "1f1b", "interleaved", "zb-h1")
BY_DEFAULT = {
    "mlp": "1f1b",
    "gpt": "gpipe",
    "t5": "accumulation",
    "u-net": "zb-h1",
    "bert": "interleaved",
    "resnet": "1f1b",
    "lstm": "gpipe",
    "moe": "accumulation",
    "two towers": "interleaved",
}


def covering() -> list[object]:
    """Each model with each schedule, each with 1, 2, 3 and 4 microbatches; one by default.

    Batches of 6 are ragged in four microbatches; at night a second one, of 5, comes after.
    """
    found: list[object] = []
    for i, name in enumerate(CASES):
        for j, schedule in enumerate(SCHEDULES):
            case = name, schedule, (i + j) % 4 + 1
            by_default = schedule == BY_DEFAULT[name]
            found.append((*case, 6) if by_default else nightly(*case, SAMPLES))
    return found


def data_of(name: str, samples: int) -> tuple[Any, ...]:
    return keras.tree.map_structure(lambda part: part[:samples], CASES[name].data)


@functools.lru_cache(maxsize=1)
def on_one_device(name: str, samples: int) -> Trained:
    case = CASES[name]
    plainly = traced if isinstance(case.data[1], list) else op_by_op  # reports of several losses
    with policy(case.policy), without_graph_optimizers():
        return train(plainly(case.build), data_of(name, samples), batch_size=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages"),
    [nightly("u-net", 3), ("u-net", 4), ("two towers", 3), nightly("two towers", 4)],
)
def test_skips_and_towers_over_several_stages(name, stages):
    case, plain = CASES[name], on_one_device(name, 6)
    with without_graph_optimizers():
        parallel = train(
            case.build,
            data_of(name, 6),
            batch_size=6,
            mesh=tap.split([stages]),
            start=plain.start,
            options={**piped(stages, 2), "verbose": 0},
        )
    assert_same(parallel, plain, case.rtol, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule", "microbatches", "samples"), covering())
def test_models_train_as_on_one_device(name, schedule, microbatches, samples):
    case, plain = CASES[name], on_one_device(name, samples)
    stages, order = (1, "1f1b") if schedule == "accumulation" else (2, schedule)
    pipeline = tap.Pipeline(stages, microbatches, order)
    with policy(case.policy), without_graph_optimizers():
        parallel = train(
            case.build,
            data_of(name, samples),
            batch_size=6,
            mesh=tap.split([stages]),
            start=plain.start,
            options={"pipeline": pipeline, "verbose": 0},
        )
    assert_same(parallel, plain, case.rtol, 1e-4 if case.policy == "float32" else 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "dtype"), [("1f1b", "float32"), nightly("zb-h1", "mixed_bfloat16")]
)
def test_pipeline_data_and_tensor_parallelism_together(schedule, dtype):
    """Dropout, sample weights and clipping, on 2 x 2 x 2 ranks."""
    case = CASES["gpt"]
    tolerances = {"rtol": 2e-3} if dtype == "float32" else {"rtol": 0.1, "loss_rtol": 1e-2}
    weights = rng.uniform(0.1, 2.0, (6, 1)).astype("float32")
    with policy(dtype):
        parallel, _ = assert_equivalent(
            case.build,
            (*data_of("gpt", 6), weights),
            tap.split([4, 2]),
            MEGATRON,
            batch_size=6,
            options=piped(2, 3, schedule),
            **tolerances,
        )
    assert tap.plan_of(parallel.model).mesh.shape == (2, 2)
    assert {s for n, s in parallel.specs().items() if "fc1/kernel" in n} == {"R,S(1)"}


class Clipped(keras.Model):
    """A train step of its own: a penalty, gradients clipped by their norm before the optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            loss += 0.01 * tf.add_n([tf.reduce_sum(w * w) for w in self.trainable_weights])
        gradients = tape.gradient(loss, self.trainable_weights)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss, "norm": norm}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule"),
    [(2, 3, "1f1b"), nightly(3, 4, "zb-v")],
)
def test_a_train_step_that_clips_before_the_optimizer(stages, microbatches, schedule):
    def build() -> keras.Model:
        x = inputs = keras.Input((8,))
        for _ in range(3):
            x = layers.Dense(10, "tanh")(x)
        model = Clipped(inputs, layers.Dense(4)(x))
        model.compile("adam", "mse", jit_compile=False)
        return model

    options = piped(stages, microbatches, schedule)
    assert_equivalent(build, numbers(8), tap.split([stages]), options=options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pinn_second_derivative", nightly("sam_optimizer")])
def test_steps_that_take_gradients_twice(name):
    """Of a gradient in the loss; and once more after the weights were moved."""
    build, draw = MODELS[name]
    assert_equivalent(build, draw(Samples()), tap.split([3]), options=piped(3, 2))


@pytest.mark.slow
def test_weights_move_to_other_stages_when_layers_are_trained_that_were_frozen():
    """Frozen, what normalises is known before any data is read; trained, it reads the batch."""

    def build() -> keras.Model:
        x = keras.Input((8,))
        h = layers.Dense(10, use_bias=False, trainable=False)(x)
        h = layers.BatchNormalization(trainable=False)(h)
        model = keras.Model(x, layers.Dense(4)(h))
        model.compile("adam", "mse", jit_compile=False)
        return model

    x, y = numbers(14)
    runs = assert_equivalent(build, (x, y), tap.split([4]), options=piped(4, 3, "gpipe"))
    for run in runs:
        for layer in run.model.layers:
            layer.trainable = True
        run.model.compile("adam", "mae", jit_compile=False)
        run.history = run.model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        run.weights = run.model.get_weights()
    assert_same(*runs)


@pytest.mark.nightly
def test_two_optimizers_of_two_models():
    def build() -> keras.Model:
        model = Gan()
        model.compile(jit_compile=False)
        return model

    x = rng.normal(size=(12, 6)).astype("float32")
    assert_equivalent(build, (x, None), tap.split([2]), options=piped(2, 3), epochs=2)


@pytest.mark.slow
def test_layers_that_are_used_twice():
    """Running statistics are written twice: all between the two lies in one stage."""

    def build() -> keras.Model:
        x = keras.Input((8,))
        norm, shared = layers.BatchNormalization(), layers.Dense(8, "tanh")
        h = norm(shared(layers.Dense(8, "tanh")(norm(shared(x)))))
        model = keras.Model(x, layers.Dense(4)(h))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
        return model

    assert_equivalent(build, numbers(8), tap.split([2]), options=piped(2, 3))


@pytest.mark.slow
def test_tensors_of_unknown_shape_stay_in_their_stage():
    texts = tf.constant(["a b", "c d", "b", "d a"] * 2)
    labels = rng.normal(size=(8, 2)).astype("float32")

    def build() -> keras.Model:
        text = keras.Input((), dtype="string")
        words = layers.TextVectorization(vocabulary=[*"abcd"], output_sequence_length=2)
        h = layers.Flatten()(layers.Embedding(8, 4)(words(text)))
        model = keras.Model(text, layers.Dense(2)(layers.Dense(4, "tanh")(h)))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    assert_equivalent(build, (texts, labels), tap.split([2]), options=piped(2, 2))


@pytest.mark.slow
def test_functions_of_one_model_have_stages_of_their_own():
    """A step, one that computes nothing of what it is fed, and one of the last layer alone."""
    x, y = numbers(8)

    def losses(parallel: bool) -> list[float]:
        keras.utils.set_random_seed(7)
        with contextlib.ExitStack() as block:
            if parallel:
                block.enter_context(tap.auto_parallel(tap.split([2]), verbose=0, **piped(2, 2)))
            model = perceptron("adam")
            model.optimizer.build(model.trainable_variables)

            def step(x, y):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
                gradients = tape.gradient(loss, model.trainable_variables)
                model.optimizer.apply(gradients, model.trainable_variables)
                return loss

            def decay():
                for weight in model.trainable_variables:
                    weight.assign(0.9 * weight)

            def last(h):
                return tf.reduce_sum(tf.square(model.get_layer("fc2")(h)))

            wrap = tap.function if parallel else lambda function: function
            step, decay, last = wrap(step), wrap(decay), wrap(last)
        found = []
        for _ in range(2):
            decay()
            found += [float(step(x, y)), float(last(tf.ones((8, 16))))]
        return found

    np.testing.assert_allclose(losses(True), losses(False), rtol=1e-5)


def of_a_model(model: keras.Model, metric: keras.metrics.Metric) -> list[tuple]:
    """Functions that train nothing, each with its arguments."""
    head = model.get_layer("fc2")
    x, h = tf.ones((8, 8)), tf.linspace(tf.zeros(16), tf.ones(16), 8)

    def read(h):
        return head(h)

    def update(value):
        metric.update_state(value)
        return metric.result()

    def both(x, h):
        """The last layer before the first; what is counted comes of both."""
        metric.update_state(head(h))
        metric.update_state(model.get_layer("fc1")(x))
        return metric.result()

    def kept(h):
        """Of a shape that is known only then, and read where another stage's weight is."""
        logits = tf.matmul(h, head.kernel)
        return tf.reduce_sum(tf.boolean_mask(logits, logits > 0)) + tf.reduce_sum(head.bias)

    def sample(h):
        return tf.random.stateless_uniform((3,), [1, 2]) + tf.reduce_max(head(h))

    def by_inputs(h):
        with tf.GradientTape() as tape:
            tape.watch(h)
            loss = tf.reduce_sum(tf.square(head(h)))
        return tape.gradient(loss, h)

    def given(x):
        return x

    return [
        (read, h),
        (update, tf.constant(2.0)),
        (both, x, h),
        (kept, h),
        (sample, h),
        (by_inputs, h),
        (given, x),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "planner"), [(2, None), nightly(3, "tap")])
def test_functions_that_train_nothing_may_have_fewer_parts_than_stages(microbatches, planner):
    """They run where the weights lie, before and after these were given their stages."""
    x, y = numbers(8)
    pipeline = tap.Pipeline(4, microbatches)

    def states(model: keras.Model) -> list:
        return [getattr(v.value, "state", None) for v in model.trainable_variables]

    def results(parallel: bool) -> list[np.ndarray]:
        keras.utils.set_random_seed(7)
        with contextlib.ExitStack() as block:
            if parallel:
                asked = {"planner": planner, "verbose": 0, "pipeline": pipeline}
                block.enter_context(tap.auto_parallel(tap.split([4]), **asked))
            model, metric = perceptron("sgd"), keras.metrics.Mean()
            functions = of_a_model(model, metric)
            wrap = tap.function if parallel else lambda function: function
            first = [wrap(function) for function, *_ in functions]
            after = [wrap(function) for function, *_ in functions]

        def called(wrapped: list) -> list[np.ndarray]:
            pairs = zip(wrapped, functions, strict=True)
            return [np.asarray(call(*given)) for call, (_, *given) in pairs]

        found = called(first)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        lies = states(model)
        assert not parallel or len({state.ranks.members for state in lies}) > 1
        found += called(after)
        assert states(model) == lies
        return found

    for got, wanted in zip(results(True), results(False), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_sent_is_returned_all_the_same():
    """Strings, and tensors whose shape is known only then: stages that need them make them."""
    with tap.auto_parallel(tap.split([2]), verbose=0, **piped(2, 1)):
        weight, bias = tf.Variable(tf.eye(3)), tf.Variable(tf.ones(3))

        @tap.function
        def step(x, name):
            h = tf.tanh(tf.matmul(tf.tanh(tf.matmul(x, weight)), weight)) + bias
            return h, tf.strings.join([name, "!"]), tf.boolean_mask(x, x > 0)

    x = rng.normal(size=(4, 3)).astype("float32")
    h, name, positive = step(x, tf.constant("a"))
    np.testing.assert_allclose(h, np.tanh(np.tanh(x)) + 1, rtol=1e-5)
    assert name.numpy() == b"a!"
    np.testing.assert_array_equal(positive, x[x > 0])
