"""Stages on ranks of their own, with the numbers of one device."""

from __future__ import annotations

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from tests.e2e.pipeline_models import CASES
from tests.e2e.test_microbatches import busy
from tests.e2e.test_mixed_precision import numbers, perceptron, policy
from tests.e2e.test_models import Gan
from tests.e2e.test_overlap import classifier, counting, samples
from tests.e2e.test_patterns import MEGATRON, gpt, moe, tokens
from tests.e2e.test_recurrent import classifier as recurrent
from tests.e2e.test_recurrent import tokens as sentences
from tests.equivalence import (
    Trained,
    assert_equivalent,
    assert_same,
    op_by_op,
    traced,
    train,
    without_graph_optimizers,
)
from tfpar.rewrite.local_graph import TASK
from tfpar.spec import PlanError, ScheduleError, SpecError, TfparError

rng = np.random.default_rng(0)


def piped(stages: int = 2, microbatches: int = 4, schedule: str = "1f1b", **more):
    return {"pipeline": tap.Pipeline(stages, microbatches, schedule, **more)}


def tasks(trained: Trained, kind: str = "train") -> list[str]:
    """The tasks that run, in the order in which they were written."""
    ops = trained.executable(kind).local.graph.ops
    names = [op.name.split("/") for op in ops if op.type == TASK]
    return [f"{task[1:]}{task[0]}{micro[10:]}" for _, task, micro in names]


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("gpipe", 2), ("1f1b", 1), ("1f1b", 3), ("interleaved", 4), ("zb-h1", 4), ("zb-v", 4)],
)
def test_every_schedule_trains_as_one_device(schedule, microbatches):
    # Batches of 8, 8 and 4: ragged in microbatches, and in the last batch.
    parallel, _ = assert_equivalent(
        perceptron, numbers(20), tap.split([2]), options=piped(2, microbatches, schedule)
    )
    plan = tap.plan_of(parallel.model)
    assert plan.stages.num_actors == 2 and plan.mesh.size == 1
    order = plan.stages.schedule.orders
    if microbatches > 1:
        ran = tasks(parallel)
        for actor in order:
            mine = [str(t) for t in actor if str(t) in ran]
            assert [t for t in ran if t in mine] == mine


@pytest.mark.slow
def test_a_transformer_in_stages_on_a_mesh_of_data_and_model():
    def adamw() -> keras.Model:
        return gpt(optimizer=keras.optimizers.AdamW(1e-3, global_clipnorm=1.0))

    parallel, _ = assert_equivalent(
        adamw, tokens(14), tap.split([4, 2]), MEGATRON, options=piped(2, 3)
    )
    assert tap.plan_of(parallel.model).mesh.shape == (2, 2)


def test_batch_statistics_and_dropout_are_those_of_the_whole_batch():
    assert_equivalent(classifier, samples(21), tap.split([4]), options=piped(2, 3))


@pytest.mark.slow
def test_weights_clipping_averages_and_added_losses():
    x, y = samples(19)
    weight = rng.uniform(0.1, 2.0, 19).astype("float32")
    assert_equivalent(busy, (x, y, weight), tap.split([2]), options=piped(2, 3, "zb-h1"))


@pytest.mark.slow
def test_a_loop_over_time_runs_in_its_stage():
    def build() -> keras.Model:
        return recurrent(lambda: [layers.LSTM(5, use_cudnn=False)], mask=True)

    x, y, *_ = sentences()
    assert_equivalent(build, (x, y), tap.split([2]), options=piped(2, 2))


@pytest.mark.slow
def test_experts_exchange_tokens_within_a_stage():
    x = rng.normal(size=(14, 6, 8)).astype("float32")
    y = rng.normal(size=(14, 6, 3)).astype("float32")
    experts = [tap.batch("data"), tap.shard("moe/w_(in|out)", dim=0, axis="data")]
    assert_equivalent(moe, (x, y), tap.split([4]), experts, options=piped(2, 2))


class Tied(layers.Layer):
    """Logits by the weights of an embedding."""

    def __init__(self, embedding: layers.Embedding, **kwargs) -> None:
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))


def tied() -> keras.Model:
    words = keras.Input((6,), dtype="int32")
    embedding = layers.Embedding(11, 8)
    h = embedding(words)
    for _ in range(3):
        h = layers.LayerNormalization()(h + layers.Dense(8, "gelu")(h))
    model = keras.Model(words, Tied(embedding)(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def test_a_tied_weight_lies_in_one_stage():
    x = rng.integers(0, 11, (16, 6))
    parallel, _ = assert_equivalent(tied, (x, np.roll(x, 1)), tap.split([2]), options=piped())
    stages = tap.plan_of(parallel.model).stages
    assert stages.owners[next(n for n in stages.owners if n.endswith("embeddings"))] == 0


def two_towers() -> keras.Model:
    """A tower for each input, one with a skip past the other stage, and two outputs."""
    a, b = keras.Input((6,), name="a"), keras.Input((5,), name="b")
    left = layers.Dense(8, "relu")(layers.Dense(8, "relu")(a))
    right = layers.Dense(8, "relu")(layers.Dense(8, "relu")(b))
    met = layers.Concatenate()([left, right])
    skipped = layers.Concatenate()([layers.Dense(8, "relu")(met), a])
    outputs = {"one": layers.Dense(2, name="one")(skipped), "two": layers.Dense(1, name="two")(met)}
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile("sgd", {"one": "mse", "two": "mae"})
    return model


@pytest.mark.parametrize("stages", [2, 3])
def test_several_inputs_and_outputs_with_skips(stages):
    x = {"a": rng.normal(size=(12, 6)), "b": rng.normal(size=(12, 5))}
    y = {"one": rng.normal(size=(12, 2)), "two": rng.normal(size=(12, 1))}
    assert_equivalent(
        two_towers,
        (x, y),
        tap.split([stages]),
        plainly=traced,
        options=piped(stages, 2, "gpipe"),
    )


def test_recomputing_stages_give_the_same():
    assert_equivalent(perceptron, numbers(16), tap.split([2]), options=piped(recompute=True))


def test_evaluation_and_prediction_go_through_the_stages():
    parallel, plain = assert_equivalent(perceptron, numbers(16), tap.split([2]), options=piped())
    x, y = numbers(11)
    np.testing.assert_allclose(
        parallel.model.evaluate(x, y, verbose=0), plain.model.evaluate(x, y, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        parallel.model.predict(x, verbose=0),
        plain.model.predict(x, verbose=0),
        rtol=1e-4,
        atol=1e-5,
    )
    assert {task[1] for task in tasks(parallel, "test")} == {"F"}


@pytest.mark.slow
def test_a_microbatch_that_overflows_skips_the_step_in_all_stages():
    x, y = numbers(3 * 64)
    y[64 + 50] = 2e4  # in the second step
    with policy("mixed_float16"):
        plain = train(perceptron, (x, y), batch_size=64)
        parts = train(
            perceptron, (x, y), batch_size=64, mesh=[2], start=plain.start, options=piped()
        )
    for run in (plain, parts):
        assert float(run.model.optimizer.dynamic_scale) == 2.0**14
        assert int(run.model.optimizer.inner_optimizer.iterations) == 2
    for got, wanted in zip(parts.weights, plain.weights, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-3)


def test_weights_move_from_one_pipeline_to_another(tmp_path):
    """A pipeline of two, then data parallelism, then a pipeline of four, as one device trains."""

    def fit(epochs: int, mesh: list[int], options: dict) -> list[np.ndarray]:
        keras.utils.set_random_seed(7)
        with tap.auto_parallel(mesh, planner=None, **options):
            model = perceptron()
        kept = tap.Checkpoint(tmp_path / "kept")
        x, y = data
        model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=[kept])
        model.save(tmp_path / "model.keras")
        return [np.array(w) for w in model.get_weights()]

    data = numbers(16)
    fit(1, [2], piped())
    fit(2, [4], {})
    weights = fit(3, [4], piped(4))
    plain = train(perceptron, data, epochs=3)
    loaded = keras.models.load_model(tmp_path / "model.keras").get_weights()
    for got, read, wanted in zip(weights, loaded, plain.weights, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(got, read)


def test_a_saved_plan_runs_the_same_stages(tmp_path):
    first = train(perceptron, numbers(16), mesh=[2], options=piped())
    plan = tap.plan_of(first.model)
    plan.save(tmp_path / "plan.json")
    again = train(perceptron, numbers(16), options={"plan": tmp_path / "plan.json"}, mesh=[2])
    found = tap.plan_of(again.model).stages
    assert found.schedule == plan.stages.schedule
    assert [*found.scopes.values()] == [*plan.stages.scopes.values()]
    for got, wanted in zip(again.weights, first.weights, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_layers_go_to_the_stages_that_are_given():
    constraint = tap.stage("dense.*", 1)
    names = ["first", "dense_a", "dense_b"]

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), *(layers.Dense(4, name=n) for n in names)])
        model.compile("sgd", "mse")
        return model

    x = rng.normal(size=(8, 4)).astype("float32")
    parallel, _ = assert_equivalent(build, (x, x), tap.split([2]), [constraint], options=piped())
    owners = tap.plan_of(parallel.model).stages.owners
    kernels = {n.split("/")[-2]: s for n, s in owners.items() if n.endswith("/kernel")}
    assert kernels == {"first": 0, "dense_a": 1, "dense_b": 1}


def test_a_stage_stores_its_own_weights_alone():
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((64,)), *(layers.Dense(64) for _ in range(4))])
        model.compile("adam", "mse")
        return model

    x = rng.normal(size=(64, 64)).astype("float32")
    trained = train(build, (x, x), batch_size=64, mesh=[2], options=piped())
    lies = {v.path: v._value.ranks.members for v in trained.model.variables}
    in_order = [lies[v.path] for v in trained.model.weights]
    assert in_order == sorted(in_order) and set(in_order) == {(0,), (1,)}
    owners = tap.plan_of(trained.model).stages.owners
    assert {lies[name][0] - stage for name, stage in owners.items() if name in lies} == {0}


SCHEDULES = ("accumulation", "gpipe", "1f1b", "interleaved", "zb-h1")


def covering() -> list[object]:
    """Each model with each schedule; each of them with 1, 2, 3 and 4 microbatches."""
    found: list[object] = []
    for i, name in enumerate(CASES):
        for j, schedule in enumerate(SCHEDULES):
            microbatches = (i + j) % 4 + 1
            marks = [] if (i, j) in ((0, 2), (8, 3)) else [pytest.mark.slow]
            found.append(pytest.param(name, schedule, microbatches, marks=marks))
    return found


@functools.lru_cache(maxsize=1)
def on_one_device(name: str) -> Trained:
    case = CASES[name]
    plainly = traced if isinstance(case.data[1], list) else op_by_op  # reports of several losses
    with policy(case.policy), without_graph_optimizers():
        return train(plainly(case.build), case.data, batch_size=6)


@pytest.mark.parametrize(("name", "schedule", "microbatches"), covering())
def test_models_train_as_on_one_device(name, schedule, microbatches):
    case, plain = CASES[name], on_one_device(name)
    stages, order = (1, "1f1b") if schedule == "accumulation" else (2, schedule)
    pipeline = tap.Pipeline(stages, microbatches, order)
    with policy(case.policy), without_graph_optimizers():
        parallel = train(
            case.build,
            case.data,
            batch_size=6,
            mesh=tap.split([stages]),
            start=plain.start,
            options={"pipeline": pipeline, "verbose": 0},
        )
    assert_same(parallel, plain, case.rtol, 1e-4 if case.policy == "float32" else 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "dtype"), [("1f1b", "float32"), ("zb-h1", "mixed_bfloat16")])
def test_pipeline_data_and_tensor_parallelism_together(schedule, dtype):
    """Dropout, sample weights and clipping, on 2 x 2 x 2 ranks."""
    case = CASES["gpt"]
    tolerances = {"rtol": 2e-3} if dtype == "float32" else {"rtol": 0.1, "loss_rtol": 1e-2}
    weights = rng.uniform(0.1, 2.0, (len(case.data[0]), 1)).astype("float32")
    with policy(dtype):
        parallel, _ = assert_equivalent(
            case.build,
            (*case.data, weights),
            tap.split([4, 2]),
            MEGATRON,
            batch_size=6,
            options=piped(2, 3, schedule),
            **tolerances,
        )
    assert tap.plan_of(parallel.model).mesh.shape == (2, 2)
    assert {s for n, s in parallel.specs().items() if "fc1/kernel" in n} == {"R,S(1)"}


# --- what cannot be, and what can all the same -----------------------------------------------


def fitted(build=perceptron, mesh=(2,), constraints=(), **options) -> keras.Model:
    with tap.auto_parallel(tap.split([*mesh]), constraints, verbose=0, **options):
        model = build()
    x, y = numbers(8)
    model.fit(x, y, batch_size=8, verbose=0)
    return model


CYCLE = "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (CYCLE, "can never end, its tasks wait for each other: 0B0 needs 1B0"),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "lacks 0B1"),
        ("0F0,0B0\n2F0,2B0", "No actor runs stage 1"),
        ("0F0,0B0,1F0\n1B0", "Stage 1 is on two actors"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(schedule, message):
    given = [tap.stage("fc1", 0), tap.stage("fc2", 1)]
    with pytest.raises(ScheduleError, match=message):
        fitted(constraints=given, pipeline=tap.Pipeline(schedule=tap.Schedule.parse(schedule)))


def test_stages_that_cannot_be_are_refused():
    with pytest.raises(PlanError, match="64 stages are too many: the model has .* parts"):
        fitted(mesh=[64], **piped(64, 1))
    with pytest.raises(SpecError, match="data=3 cannot be divided into 2 parts"):
        fitted(mesh=[3], **piped())
    with pytest.raises(SpecError, match="there are 2 stages, numbered from 0 to 1"):
        fitted(constraints=tap.stage("fc1", 2), **piped())
    with pytest.raises(PlanError, match="cannot be in an earlier stage"):
        fitted(constraints=[tap.stage("fc1", 1), tap.stage("fc2", 0)], **piped())
    with pytest.raises(SpecError, match="there is no pipeline of several stages"):
        fitted(constraints=tap.stage("fc1", 1))


def test_an_effect_that_each_microbatch_would_have_is_refused():
    with tap.auto_parallel(tap.split([2]), verbose=0, **piped(2, 2)):
        model = counting()
    before = model.get_weights()
    x, y = samples(8)
    with pytest.raises(TfparError, match="has an effect, which each of 2 microbatches would have"):
        model.fit(x, y, batch_size=8, verbose=0)
    for value, kept in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, kept)


def test_models_that_run_eagerly_run_on_one_device(caplog):
    def eager() -> keras.Model:
        model = perceptron()
        model.run_eagerly = True
        return model

    assert_equivalent(eager, numbers(8), tap.split([2]), options=piped(2, 2))
    assert "runs on one device, not on the mesh" in caplog.text


@pytest.mark.slow
def test_more_microbatches_than_samples():
    assert_equivalent(perceptron, numbers(11), tap.split([2]), options=piped(2, 9))


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


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule"),
    [(2, 3, "1f1b"), pytest.param(3, 4, "zb-v", marks=pytest.mark.slow)],
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
    assert_equivalent(build, numbers(14), tap.split([stages]), options=options)


@pytest.mark.slow
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

    assert_equivalent(build, numbers(14), tap.split([2]), options=piped(2, 3))


@pytest.mark.slow
def test_tensors_of_unknown_shape_stay_in_their_stage():
    texts = tf.constant(["a b", "c d", "b", "d a"] * 3)
    labels = rng.normal(size=(12, 2)).astype("float32")

    def build() -> keras.Model:
        text = keras.Input((), dtype="string")
        words = layers.TextVectorization(vocabulary=[*"abcd"], output_sequence_length=2)
        h = layers.Flatten()(layers.Embedding(8, 4)(words(text)))
        model = keras.Model(text, layers.Dense(2)(layers.Dense(4, "tanh")(h)))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    assert_equivalent(build, (texts, labels), tap.split([2]), options=piped(2, 2))


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


def test_a_schedule_of_others_runs(tmp_path):
    """As PyTorch's pipelining writes it: idle cells, halves, a pair, and what it sends."""
    path = tmp_path / "schedule.csv"
    path.write_text(
        "0F0,0SEND_F0,0F1,,(0F2;0I0)OVERLAP_F_B,0W0,0I1,0W1,0I2,0W2\n"
        "1RECV_F0,1F0,1B0,1F1,1B1,1F2,1B2\n"
    )
    schedule = tap.Schedule.load(path)
    parallel, _ = assert_equivalent(
        perceptron,
        numbers(12),
        tap.split([2]),
        [tap.stage("fc2", 1)],
        options={"pipeline": tap.Pipeline(schedule=schedule)},
    )
    assert tap.plan_of(parallel.model).stages.schedule == schedule
    ran = tasks(parallel)
    assert [t for t in ran if t[0] == "1"] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]


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
