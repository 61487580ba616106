"""Stages on ranks of their own, with the numbers of one device."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.e2e.test_microbatches import busy
from tests.e2e.test_mixed_precision import numbers, perceptron, policy
from tests.e2e.test_overlap import classifier, samples
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
)
from tfpar.compile.local import TASK, WrittenStep, split_stages
from tfpar.spec import MemoryLimitError

rng = np.random.default_rng(0)


def piped(stages: int = 2, microbatches: int = 4, schedule: str = "1f1b", **more):
    return {"pipeline": tap.Pipeline(stages, microbatches, schedule, **more)}


def tasks(trained: Trained, kind: str = "train") -> list[str]:
    """The tasks that run, in the order in which they were written."""
    ops = trained.executable(kind).local.graph.ops
    names = [op.name.split("/") for op in ops if op.type == TASK]
    return [f"{task[1:]}{task[0]}{micro[10:]}" for _, task, micro in names]


@functools.cache
def on_one_device(samples: int) -> Trained:
    return train(op_by_op(perceptron), numbers(samples))


def same_as_one_device(samples: int, mesh: list[int], options: dict, constraints=(), **more):
    """Train `perceptron` in stages, and compare it with the same on one device."""
    plain = on_one_device(samples)
    parallel = train(
        perceptron,
        numbers(samples),
        mesh=tap.split(mesh),
        constraints=constraints,
        start=plain.start,
        options=options,
        **more,
    )
    assert_same(parallel, plain)
    return parallel


@pytest.mark.slow
def test_stages_need_not_end_with_a_machine():
    """Of three machines of two ranks, each of two stages has one and a half."""
    parallel = same_as_one_device(12, [3, 2], piped())
    plan = tap.plan_of(parallel.model)
    assert plan.stages.num_actors == 2 and plan.mesh.shape == (3, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [
        nightly("gpipe", 2),
        nightly("1f1b", 1),
        ("1f1b", 3),
        nightly("interleaved", 4),
        ("zb-h1", 4),
        ("zb-v", 4),
    ],
)
def test_every_schedule_trains_as_one_device(schedule, microbatches):
    # Batches of 8 and 4: ragged in microbatches, and in the last batch.
    parallel = same_as_one_device(12, [2], piped(2, microbatches, schedule))
    plan = tap.plan_of(parallel.model)
    assert plan.stages.num_actors == 2 and plan.mesh.size == 1
    order = plan.stages.schedule.orders
    if microbatches > 1:
        ran = tasks(parallel)
        for actor in order:
            mine = [str(t) for t in actor if str(t) in ran]
            assert [t for t in ran if t in mine] == mine


@pytest.mark.slow
@pytest.mark.parametrize("virtual_stages", [nightly(None), 2])
def test_a_picked_schedule_trains_as_one_device(virtual_stages, tmp_path):
    options = piped(2, 3, "auto", virtual_stages=virtual_stages)
    parallel = same_as_one_device(8, [2], options, planner="tap")
    plan = tap.plan_of(parallel.model)
    assert "picked by simulation" in plan.summary()
    ran = tasks(parallel)
    for actor in plan.stages.schedule.orders:
        mine = [str(t) for t in actor if str(t) in ran]
        assert mine and [t for t in ran if t in mine] == mine
    plan.save(tmp_path / "plan.json")
    loaded = same_as_one_device(8, [2], {"plan": str(tmp_path / "plan.json")})
    stages = tap.plan_of(loaded.model).stages
    assert (stages.schedule, stages.cost) == (plan.stages.schedule, plan.stages.cost)
    assert tasks(loaded) == ran


@pytest.mark.nightly
def test_a_transformer_in_stages_on_a_mesh_of_data_and_model():
    def adamw() -> keras.Model:
        return gpt(optimizer=keras.optimizers.AdamW(1e-3, global_clipnorm=1.0))

    parallel, _ = assert_equivalent(
        adamw, tokens(8), tap.split([4, 2]), MEGATRON, options=piped(2, 3)
    )
    assert tap.plan_of(parallel.model).mesh.shape == (2, 2)


@pytest.mark.slow
def test_batch_statistics_and_dropout_are_those_of_the_whole_batch():
    assert_equivalent(classifier, samples(8), tap.split([4]), options=piped(2, 3))


@pytest.mark.slow
def test_weights_clipping_averages_and_added_losses():
    x, y = samples(16)
    weight = rng.uniform(0.1, 2.0, 16).astype("float32")
    assert_equivalent(busy, (x, y, weight), tap.split([2]), options=piped(2, 3, "zb-h1"))


def perceptron_of_two_blocks() -> keras.Model:
    names = ["fc1_a", "fc2_a", "fc1_b", "fc2_b"]
    hidden = [layers.Dense(8, "tanh", name=name) for name in names]
    model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(8, name="head")])
    model.compile("adam", "mse", jit_compile=False)
    return model


IN_TWO = (
    tap.batch("data"),
    tap.shard("fc1_./kernel", dim=1, axis="model"),
    tap.shard("fc2_./kernel", dim=0, axis="model"),
    tap.stage("fc._a", 0),
    tap.stage("fc._b|head", 1),
)


@pytest.mark.slow
@pytest.mark.parametrize("between", [1e5, nightly(1e15)])
def test_links_that_are_slow_between_stages_carry_a_part_of_what_both_ranks_hold(between):
    """Stages on machines of their own, of two ranks that split their layers; as it is planned."""
    slow = [tap.Level(2, between, 0.0), tap.Level(2, 1e12, 0.0)]
    cluster = tap.Cluster.regular("pairs", tap.Device({"float32": 1e9}, 1e9, 1e9), slow)
    x = rng.normal(size=(16, 8)).astype("float32")
    parallel, plain = assert_equivalent(
        perceptron_of_two_blocks,
        (x, x),
        tap.split([2, 2]),
        IN_TWO,
        planner="tap",
        cluster=cluster,
        options=piped(2, 2),
    )
    plan = tap.plan_of(parallel.model)
    assert plan.mesh.shape == (1, 2)
    written = [WrittenStep(parallel.executable().local)] * plan.stages.num_actors
    programs = split_stages(written, plan.stages.schedule).programs
    sends = [[op for op in p.graph.ops if op.type == "Send"] for p in programs.values()]
    sent = [sum(op.inputs[0].num_bytes for op in ops if op.inputs[0].shape) for ops in sends]
    whole = 8 * 8 * 4  # of a batch of 8: there and back
    assert sent == [share.sent_bytes for share in plan.stages.cost.stages]
    assert sent == ([whole // 2] * 2 if between == 1e5 else [whole] * 2)
    predicted = [trained.model.predict(x, batch_size=8, verbose=0) for trained in (parallel, plain)]
    np.testing.assert_allclose(*predicted, rtol=1e-4, atol=1e-5)
    names = [op.name for g in parallel.executable("predict").local.graphs() for op in g.ops]
    assert any("/slices" in name for name in names) == (between == 1e5)


@pytest.mark.nightly
def test_a_loop_over_time_runs_in_its_stage():
    def build() -> keras.Model:
        return recurrent(lambda: [layers.LSTM(5, use_cudnn=False)], mask=True)

    x, y, *_ = sentences()
    assert_equivalent(build, (x, y), tap.split([2]), options=piped(2, 2))


@pytest.mark.slow
def test_experts_exchange_tokens_within_a_stage():
    x = rng.normal(size=(8, 6, 8)).astype("float32")
    y = rng.normal(size=(8, 6, 3)).astype("float32")
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
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    return model


@pytest.mark.slow
def test_a_tied_weight_lies_in_one_stage():
    x = rng.integers(0, 11, (8, 6))
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
    model.compile("sgd", {"one": "mse", "two": "mae"}, jit_compile=False)
    return model


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [2, 3])
def test_several_inputs_and_outputs_with_skips(stages):
    x = {"a": rng.normal(size=(8, 6)), "b": rng.normal(size=(8, 5))}
    y = {"one": rng.normal(size=(8, 2)), "two": rng.normal(size=(8, 1))}
    assert_equivalent(
        two_towers,
        (x, y),
        tap.split([stages]),
        plainly=traced,
        options=piped(stages, 2, "gpipe"),
    )


def test_recomputing_stages_give_the_same():
    same_as_one_device(8, [2], piped(recompute=True))


def dropping() -> keras.Model:
    """Draws in every stage, be it in two or three."""
    x = inputs = keras.Input((6,))
    for i in range(4):
        x = layers.Dropout(0.4, seed=i)(layers.Dense(10, "tanh")(x))
    model = keras.Model(inputs, layers.Dense(2)(x))
    model.compile("sgd", "mse", jit_compile=False)
    return model


DROPPED = rng.normal(size=(8, 6)), rng.normal(size=(8, 2))


@functools.cache
def dropping_on_one_device() -> Trained:
    return train(op_by_op(dropping), DROPPED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "asked"),
    [
        (3, dict(stages=3, microbatches=4, recompute=[1])),
        (3, dict(ranks=[[0], [1, 2]], microbatches=2, recompute=[1])),
        (2, dict(stages=2, microbatches=2, schedule="interleaved", recompute=[0, 2])),
    ],
)
def test_one_stage_that_recomputes_draws_the_same_mask(ranks, asked):
    plain = dropping_on_one_device()
    options = {"pipeline": tap.Pipeline(**asked)}
    parallel = train(dropping, DROPPED, mesh=[ranks], start=plain.start, options=options)
    assert_same(parallel, plain)
    functions = parallel.executable("train").local.graph.functions
    drawn = {
        int(name.partition("_B")[2])
        for name, body in functions.items()
        if "_B" in name and any("Random" in op.type for op in body.ops)
    }
    assert drawn == {*asked["recompute"]}


@pytest.mark.slow
def test_evaluation_and_prediction_go_through_the_stages():
    parallel, plain = assert_equivalent(perceptron, numbers(8), tap.split([2]), options=piped())
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


@pytest.mark.nightly
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


@pytest.mark.slow
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

    data = numbers(8)
    fit(1, [2], piped())
    fit(2, [4], {})
    weights = fit(3, [4], piped(4))
    plain = train(op_by_op(perceptron), data, epochs=3)
    loaded = keras.models.load_model(tmp_path / "model.keras").get_weights()
    for got, read, wanted in zip(weights, loaded, plain.weights, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(got, read)


@pytest.mark.slow
def test_a_saved_plan_runs_the_same_stages(tmp_path):
    first = train(perceptron, numbers(8), mesh=[2], options=piped())
    plan = tap.plan_of(first.model)
    plan.save(tmp_path / "plan.json")
    again = train(perceptron, numbers(8), options={"plan": tmp_path / "plan.json"}, mesh=[2])
    found = tap.plan_of(again.model).stages
    assert found.schedule == plan.stages.schedule
    assert [*found.scopes.values()] == [*plan.stages.scopes.values()]
    for got, wanted in zip(again.weights, first.weights, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow
def test_a_pipeline_that_was_not_searched_is_priced_and_fits_where_memory_is_named():
    small = tap.Device({"float32": 1e9}, 1e3, 1e9)
    cluster = tap.Cluster.regular("small", small, [tap.Level(2, 1e9, 0.0)])
    refused = "What the constraints give does not fit"
    with pytest.raises(MemoryLimitError, match=refused):
        train(perceptron, numbers(8), mesh=[2], cluster=cluster, options=piped())
    with pytest.raises(MemoryLimitError, match=refused):
        train(perceptron, numbers(8), mesh=[2], options=piped() | {"memory_limit": "1 kB"})
    trained = train(perceptron, numbers(8), mesh=[2], options=piped())
    plan = tap.plan_of(trained.model)
    assert not plan.planner and len(plan.stages.cost.stages) == 2
    assert "Given by constraints, priced for cluster 'cpu" in plan.summary()


@pytest.mark.slow
def test_machines_that_were_only_detected_refuse_nothing_and_leave_the_program(monkeypatch):
    """No slices are sent for links of a guess, and what memory it has is not enforced."""
    levels = [tap.Level(2, 1e5, 0.0), tap.Level(2, 1e12, 0.0)]
    tiny = tap.Cluster.regular("tiny", tap.Device({"float32": 1e9}, 1.0, 1e9), levels)
    x = rng.normal(size=(16, 8)).astype("float32")

    def slices(**options: tap.Cluster) -> bool:
        found = train(
            perceptron_of_two_blocks,
            (x, x),
            mesh=tap.split([2, 2]),
            constraints=IN_TWO,
            options=piped(2, 2),
            **options,
        )
        plan = tap.plan_of(found.model)
        assert not plan.planner and plan.cluster == options.get("cluster", tiny)
        assert plan.cost.memory_bytes > 1.0
        names = [op.name for g in found.executable().local.graphs() for op in g.ops]
        return any("/slices" in name for name in names)

    assert slices(cluster=tiny.with_memory(1e9))
    monkeypatch.setattr("tfpar.tf.steps.step_planner.detect_cluster", lambda mesh: tiny)
    assert not slices()


@pytest.mark.slow
def test_layers_go_to_the_stages_that_are_given():
    constraint = tap.stage("dense.*", 1)
    names = ["first", "dense_a", "dense_b"]

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), *(layers.Dense(4, name=n) for n in names)])
        model.compile("sgd", "mse", jit_compile=False)
        return model

    x = rng.normal(size=(8, 4)).astype("float32")
    parallel, _ = assert_equivalent(build, (x, x), tap.split([2]), [constraint], options=piped())
    owners = tap.plan_of(parallel.model).stages.owners
    kernels = {n.split("/")[-2]: s for n, s in owners.items() if n.endswith("/kernel")}
    assert kernels == {"first": 0, "dense_a": 1, "dense_b": 1}


@pytest.mark.slow
def test_a_stage_stores_its_own_weights_alone():
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((64,)), *(layers.Dense(64) for _ in range(4))])
        model.compile("adam", "mse", jit_compile=False)
        return model

    x = rng.normal(size=(64, 64)).astype("float32")
    trained = train(build, (x, x), batch_size=64, mesh=[2], options=piped())
    lies = {v.path: v._value.ranks.members for v in trained.model.variables}
    in_order = [lies[v.path] for v in trained.model.weights]
    assert in_order == sorted(in_order) and set(in_order) == {(0,), (1,)}
    owners = tap.plan_of(trained.model).stages.owners
    assert {lies[name][0] - stage for name, stage in owners.items() if name in lies} == {0}


@pytest.mark.slow
def test_more_microbatches_than_samples():
    same_as_one_device(8, [2], piped(2, 9))


@pytest.mark.slow
def test_a_schedule_of_others_runs(tmp_path):
    """As PyTorch's pipelining writes it: idle cells, halves, a pair, and what it sends."""
    path = tmp_path / "schedule.csv"
    path.write_text(
        "0F0,0SEND_F0,0F1,,(0F2;0I0)OVERLAP_F_B,0W0,0I1,0W1,0I2,0W2\n"
        "1RECV_F0,1F0,1B0,1F1,1B1,1F2,1B2\n"
    )
    schedule = tap.Schedule.load(path)
    options = {"pipeline": tap.Pipeline(schedule=schedule)}
    parallel = same_as_one_device(8, [2], options, [tap.stage("fc2", 1)])
    assert tap.plan_of(parallel.model).stages.schedule == schedule
    ran = tasks(parallel)
    assert [t for t in ran if t[0] == "1"] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
