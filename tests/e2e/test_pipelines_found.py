"""`pipeline="auto"`: the planner decides whether there are stages, and how many."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.clusters import device, two_levels
from tests.e2e.test_overlap import Counting
from tests.equivalence import assert_equivalent
from tfpar.cluster import Cluster, Level, Link
from tfpar.observability.report import explain_rejection
from tfpar.planning import UNCERTAINTY
from tfpar.spec import ArgumentError, SpecError

rng = np.random.default_rng(0)


def machines(bandwidth: float, count: int = 2) -> Cluster:
    """Machines of one slow device each, with links of so many bytes/s between them."""
    slow = device(1e9, 1e9, 1e9, 1e11, 1e-6)
    return two_levels("pairs", count, 1, slow, Link(1e10, 1e-6), Link(bandwidth, 1e-6))


def deep(width: int = 256) -> keras.Model:
    """Layers whose weights are many times larger than what they send each other."""
    inputs = keras.Input((width,))
    h = inputs
    for i in range(4):
        h = layers.Dense(width, "relu", name=f"fc{i}")(h)
        h = layers.Dropout(0.1, seed=i)(h)
    model = keras.Model(inputs, layers.Dense(3, name="classes")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    return model


def rows(count: int, width: int = 256):
    return rng.normal(size=(count, width)).astype("float32"), rng.integers(0, 3, count)


@pytest.mark.slow
def test_stages_where_links_are_slow():
    parallel, _ = assert_equivalent(
        deep,
        rows(16),
        tap.split([2]),
        planner="tap",
        cluster=machines(3e6),
        options={"pipeline": "auto"},
        batch_size=16,
    )
    plan = tap.plan_of(parallel.model)
    assert plan.stages is not None and plan.num_ranks == 2
    (alone,) = plan.findings.rivals
    assert alone.name.startswith("no stages") and alone.cost.seconds > plan.cost.seconds
    for cost in (plan.cost, alone.cost):
        idle = cost.exposed_s + cost.transfer_s + cost.bubble_s
        work = sum(cost.compute_s) + sum(cost.communication_s) - cost.hidden_s
        assert work + idle == pytest.approx(cost.seconds)
    assert plan.cost.transfer_s > 0 == alone.cost.transfer_s
    assert "Pipelines that were compared" in plan.summary(full=True)
    assert tap.Plan.from_json(plan.to_json()).findings.rivals == plan.findings.rivals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bandwidth", "stages", "other", "faster"),
    [(3e6, 2, 1, False), pytest.param(3e5, 1, 2, True, marks=pytest.mark.nightly)],
)
def test_the_runner_up_wins_where_links_are_as_the_plan_says(bandwidth, stages, other, faster):
    def planned(links: float) -> tap.Plan:
        return tap.plan(deep, batch, [2], machines(links), pipeline="auto", planner="tap")

    def found(plan: tap.Plan) -> int:
        return plan.num_ranks // plan.mesh.size

    batch = rows(16)
    plan = planned(bandwidth)
    (rival,) = plan.findings.rivals
    assert rival.links is None, "nobody has asked"
    plan = plan.with_turning_points()
    (rival,) = plan.findings.rivals
    assert found(plan) == stages and rival.links is not None
    assert (rival.links > 1) == faster
    nearer = rival.links / 1.1 if faster else rival.links * 1.1
    assert found(planned(bandwidth * rival.links)) == other
    assert found(planned(bandwidth * nearer)) == stages
    assert f"times {'faster' if faster else 'slower'}" in explain_rejection(rival, plan)


@pytest.mark.nightly
def test_ranks_have_several_stages_where_few_microbatches_cannot_fill_the_pipeline():
    def build():
        hidden = [layers.Dense(256, "tanh") for _ in range(12)]
        model = keras.Sequential([keras.Input((256,)), *hidden, layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=False)
        return model

    cluster = machines(1e8, 3)
    parallel, _ = assert_equivalent(
        build,
        (rng.normal(size=(4, 256)).astype("float32"), rng.normal(size=(4, 1)).astype("float32")),
        tap.split([3]),
        planner="tap",
        cluster=cluster,
        options={"pipeline": "auto"},
        batch_size=2,
    )
    plan = tap.plan_of(parallel.model)
    assert plan.stages.num_stages > plan.stages.num_actors == 3
    batch = np.zeros((2, 256), "float32"), np.zeros((2, 1), "float32")
    one_each = tap.Pipeline(3, 2, schedule="auto")
    other = tap.plan(build, batch, [3], cluster, pipeline=one_each, planner="tap")
    assert plan.cost.seconds < other.cost.seconds / (1 + UNCERTAINTY)
    assert tap.Plan.from_json(plan.to_json()).stages == plan.stages


@pytest.mark.nightly
def test_what_is_evaluated_before_training_moves_to_its_stages():
    x, y = rows(16)

    def trained(model: keras.Model) -> list[float]:
        first = model.evaluate(x, y, batch_size=16, verbose=0)
        history = model.fit(x, y, batch_size=16, verbose=0).history
        return [*first, *history["loss"], *model.evaluate(x, y, batch_size=16, verbose=0)]

    keras.utils.set_random_seed(0)
    plain = deep()
    plain.run_eagerly = True
    expected = trained(plain)
    keras.utils.set_random_seed(0)
    options = tap.Options(planner="tap", cluster=machines(3e6), verbose=0)
    with tap.auto_parallel([2], options=options, pipeline="auto"):
        model = deep()
    np.testing.assert_allclose(trained(model), expected, rtol=1e-5)
    assert tap.plan_of(model).stages is not None


@pytest.mark.nightly
def test_unasked_stages_are_found_between_machines_and_not_within_one():
    def planned(cluster, **options):
        return tap.plan(deep, rows(128), [4], cluster, planner="tap", **options)

    apart = machines(1e7, 4)
    (node,) = {*apart.nodes}
    within = dataclasses.replace(node, count=1, levels=(Level(4, 1e7, 1e-6),))
    assert planned(apart).stages is not None
    for plan in (
        planned(dataclasses.replace(apart, nodes=(within,), levels=())),
        planned(apart, pipeline=tap.Pipeline(microbatches=1)),
        planned(apart, constraints=[tap.replicate(".*")]),
    ):
        assert plan.stages is None and not plan.findings.rivals


@pytest.mark.nightly
def test_unasked_stages_are_found_where_links_are_too_slow_to_share_anything_without():
    batch, cluster = rows(4), machines(3e6)
    without = tap.Pipeline(microbatches=1)
    alone = tap.plan(deep, batch, [2], cluster, planner="tap", pipeline=without)
    assert alone.cost.exposed_s + sum(alone.cost.communication_s) < sum(alone.cost.compute_s) / 2
    plan = tap.plan(deep, batch, [2], cluster, planner="tap")
    assert plan.stages is not None and plan.cost.seconds < alone.cost.seconds


@pytest.mark.slow
def test_no_stages_where_the_work_is_spread_evenly_without():
    plan = tap.plan(deep, rows(256), [2], machines(1e11), pipeline="auto", planner="tap")
    assert plan.stages is None and plan.microbatches == 1
    (rival,) = plan.findings.rivals
    assert "nearly as fast as the work alone" in rival.reason


@pytest.mark.nightly
def test_memory_decides():
    free = tap.plan(deep, rows(256), [2], machines(1e11), planner="tap")
    assert free.pipeline is None
    limit = 0.45 * free.cost.memory_bytes
    plan = tap.plan(deep, rows(256), [2], machines(1e11), memory_limit=limit, planner="tap")
    assert plan.pipeline is not None
    assert plan.cost.memory_bytes <= limit < free.cost.memory_bytes


@pytest.mark.slow
def test_constraints_on_stages_say_how_many_there_are_at_least():
    third = [tap.stage("fc3", 2)]
    plan = tap.plan(deep, rows(16), [4], machines(1e9, 4), third, pipeline="auto", planner="tap")
    assert plan.stages.num_stages == 4
    assert plan.stages.owners["fc3/kernel"] == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"pipeline": "best"}, ArgumentError, "a tap.Pipeline, such as .*, or 'auto'"),
        ({"pipeline": "auto", "planner": None}, ArgumentError, "pipeline='auto' needs a planner"),
        ({"pipeline": "auto", "chunks": 2}, ArgumentError, "chunks or a pipeline"),
    ],
)
def test_what_cannot_be_decided_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        tap.auto_parallel([2], **arguments)


def test_a_stage_that_the_mesh_has_not_is_refused():
    with pytest.raises(SpecError, match="there are 2 stages"):
        tap.plan(deep, rows(16), [2], constraints=[tap.stage("fc3", 2)], pipeline="auto")


@pytest.mark.slow
def test_an_effect_that_microbatches_would_repeat_takes_the_pipeline_away(caplog):
    def counted() -> keras.Model:
        inputs = keras.Input((4,))
        h = Counting()(inputs)
        for _ in range(4):
            h = layers.Dense(256, "relu")(h)
        model = keras.Model(inputs, layers.Dense(3)(h))
        model.compile(
            "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
        )
        return model

    parallel, _ = assert_equivalent(
        counted,
        rows(16, 4),
        tap.split([2]),
        planner="tap",
        cluster=machines(3e6),
        options={"pipeline": "auto"},
        batch_size=16,
    )
    assert tap.plan_of(parallel.model).stages is None
    assert any("is planned anew without one" in line for line in caplog.messages)


@pytest.mark.slow
def test_what_annealing_finds_trains_as_one_device_does():
    parallel, _ = assert_equivalent(
        deep,
        rows(16),
        tap.split([4]),
        planner="tap",
        cluster=machines(3e6, 4),
        options={"pipeline": tap.Pipeline("auto", search="anneal")},
        batch_size=16,
    )
    plan = tap.plan_of(parallel.model)
    assert plan.stages is not None and plan.num_ranks == 4
    assert any(rival.name.startswith("no stages") for rival in plan.findings.rivals)
