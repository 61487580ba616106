"""What plans are best at: the latency of predictions, and samples for a dollar."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tfpar.cluster import Cluster, Device, Level, Node
from tfpar.spec import ArgumentError, MemoryLimitError, SpecError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 8)).astype("float32"), RNG.normal(size=(12, 6)).astype("float32")
LIMIT = "40 kB"
"""Less than the weights of `build`, 66 kB."""


def build(compiled: bool = False) -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    wide = [layers.Dense(120, "relu", name=f"fc{i}") for i in range(2)]
    model = keras.Sequential(
        [keras.Input((8,)), *wide, layers.Dropout(0.5), layers.Dense(6, name="out")], name="m"
    )
    if compiled:
        model.compile("sgd", "mse", jit_compile=False)
    return model


def deep() -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    wide = [layers.Dense(40, "relu", name=f"fc{i}") for i in range(6)]
    return keras.Sequential([keras.Input((8,)), *wide, layers.Dense(6, name="out")], name="m")


def specs(model: keras.Model) -> dict[str, object]:
    return {n: v.spec for n, v in tap.plan_of(model).variables.items() if v.trainable}


@pytest.mark.slow
def test_a_model_that_only_predicts_runs_where_one_device_has_no_room():
    expected = build().predict(X, batch_size=8, verbose=0)
    found = tap.plan(build, X, 4, "cpu", objective="latency", memory_limit=LIMIT)
    assert found.cost.memory_bytes <= 40e3 < found.findings.baselines[0].memory_bytes
    assert found.cost.compute_s[1:] == (0.0, 0.0), "neither backward pass nor update"
    with tap.auto_parallel(4, objective="latency", memory_limit=LIMIT, cluster="cpu", verbose=0):
        searched = build()
    with tap.auto_parallel(plan=found, verbose=0):
        given = build()
    for model in (searched, given):
        # Of 12 samples the last batch has 4.
        np.testing.assert_allclose(
            model.predict(X, batch_size=8, verbose=0), expected, rtol=1e-5, atol=1e-6
        )
        assert any(spec != (tap.Replicate(),) * len(spec) for spec in specs(model).values())
    with pytest.raises(MemoryLimitError, match="4 ranks share all weights"):
        tap.plan(build, X, 4, "cpu", objective="latency", memory_limit="10 kB")


SLOW_LINKS = Cluster.regular(
    "slow links", Device({"float32": 1e8}, 24e3, 1e9, name="small"), [Level(2, 1e6, 1e-5)]
)
"""Splitting a weight costs more than waiting for another stage, and one device has no room."""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
def test_a_model_that_only_predicts_gets_stages_where_links_are_slow(rows):
    expected = deep().predict(X, batch_size=rows, verbose=0)
    options = {"objective": "latency", "planner": "tap", "pipeline": "auto"}
    found = tap.plan(deep, X[:rows], 2, SLOW_LINKS, **options)
    assert found.stages.num_stages >= 2 == found.num_ranks
    assert found.microbatches <= rows and found.fits(24e3)
    assert found.findings.baselines[0].memory_bytes > 24e3
    assert {ran.task[1] for ran in found.stages.cost.tasks} == {"F"}
    split = next(one for one in found.findings.rivals if one.name.startswith("no stages"))
    assert split.seconds > found.cost.seconds
    with tap.auto_parallel(plan=found, verbose=0):
        given = deep()
    with tap.auto_parallel(2, cluster=SLOW_LINKS, verbose=0, **options):
        searched = deep()
    for model in (given, searched):
        np.testing.assert_allclose(
            model.predict(X, batch_size=rows, verbose=0), expected, rtol=1e-5, atol=1e-6
        )
        assert tap.plan_of(model).cost == found.cost
    with pytest.raises(MemoryLimitError, match="Use more stages or microbatches, or put fewer lay"):
        given_stages = options | {"pipeline": tap.Pipeline(2, 1), "memory_limit": "19 kB"}
        tap.plan(deep, X[:rows], 2, SLOW_LINKS, **given_stages)


@pytest.mark.slow
def test_predictions_run_in_given_stages_of_unlike_numbers_of_ranks():
    expected = deep().predict(X, batch_size=8, verbose=0)
    machines = dataclasses.replace(
        SLOW_LINKS, nodes=(Node(SLOW_LINKS.device, (Level(3, 1e6, 0.0),)),)
    )
    pipeline = tap.Pipeline(ranks=[[2], [0, 1]], microbatches=4)
    options = {"objective": "latency", "planner": "tap", "pipeline": pipeline}
    found = tap.plan(deep, X[:8], 3, machines, **options)
    assert [mesh.size for mesh in found.meshes] == [1, 2] and found.stages.ranks == (2, 0, 1)
    with tap.auto_parallel(plan=found, verbose=0):
        model = deep()
    np.testing.assert_allclose(
        model.predict(X, batch_size=8, verbose=0), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_whoever_trains_after_predictions_in_stages_trains_in_them():
    expected = build(compiled=True)
    before = expected.predict(X, batch_size=12, verbose=0)
    history = expected.fit(X, Y, batch_size=12, verbose=0).history["loss"]
    pipeline = tap.Pipeline(2, 3)
    with tap.auto_parallel(2, objective="latency", planner="tap", pipeline=pipeline, verbose=0):
        model = build(compiled=True)
    found = model.predict(X, batch_size=12, verbose=0)
    np.testing.assert_allclose(found, before, rtol=1e-5, atol=1e-6)
    owners = tap.plan_of(model).stages.owners
    found = model.fit(X, Y, batch_size=12, verbose=0).history["loss"]
    assert found == pytest.approx(history, rel=1e-5)
    trained = tap.plan_of(model).stages
    assert {name: trained.owners[name] for name in owners} == owners and trained.num_stages == 2


@pytest.mark.slow
def test_whoever_trains_keeps_the_weights_as_predictions_want_them():
    """Whichever comes first."""
    expected = build(compiled=True)
    before = expected.predict(X, batch_size=12, verbose=0)
    history = expected.fit(X, Y, batch_size=12, verbose=0).history
    after = expected.predict(X, batch_size=12, verbose=0)
    constraints = tap.shard("fc0/kernel", dim=1, axis="model")
    laid = []
    for first in ("fit", "predict"):
        with tap.auto_parallel(
            {"data": 2, "model": 2}, constraints, objective="latency", verbose=0
        ):
            model = build(compiled=True)
        if first == "predict":
            found = model.predict(X, batch_size=12, verbose=0)
            np.testing.assert_allclose(found, before, rtol=1e-5, atol=1e-6)
            predicting = specs(model)
        assert model.fit(X, Y, batch_size=12, verbose=0).history == pytest.approx(history)
        laid.append(specs(model))
        found = model.predict(X, batch_size=12, verbose=0)
        np.testing.assert_allclose(found, after, rtol=1e-5, atol=1e-6)
    assert laid == [predicting] * 2 and predicting["m/fc0/kernel"][1] == tap.Shard(1)


def test_a_constraint_that_predictions_do_not_have_is_refused():
    constraints = tap.shard("other/kernel", dim=1, axis="model")
    with tap.auto_parallel({"data": 2, "model": 2}, constraints, objective="latency", verbose=0):
        model = build()
    with pytest.raises(SpecError, match="other/kernel"):
        model.predict(X, batch_size=12, verbose=0)


def test_what_leaves_nothing_to_decide_is_refused():
    with pytest.raises(ArgumentError, match="^Give objective='latency' where plans are searched"):
        tap.Options(objective="latency", planner=None)
    with pytest.raises(ArgumentError, match=r"^search='anneal' searches .* give pipeline='auto'"):
        tap.Options(objective="latency", pipeline=tap.Pipeline("auto", search="anneal"))
    with pytest.raises(ArgumentError, match=r"rank 0 \(CPU\) of cluster 'cpu' is not known"):
        tap.auto_parallel(2, objective="samples_per_dollar", cluster="cpu")


# --- rent ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_is_told_which_of_its_devices_are_worth_it(capsys):
    device = Device({"float32": 1e9}, 1e9, 1e9, price_per_hour=1.5, name="one")
    rented = Cluster.regular("rented", device, [Level(2, 1e3, 1.0)])
    with tap.auto_parallel(2, cluster=rented, objective="samples_per_dollar", planner="tap"):
        model = build(compiled=True)
    model.fit(X, Y, batch_size=12, verbose=0)
    plan = tap.plan_of(model)
    assert plan.num_ranks == 2 and plan.findings.rentals[0].ranks == (0, 1)
    said = "".join(capsys.readouterr())
    assert (
        "a dollar computes more samples on 1 x one of 1 machine (rank 0) alone than on all" in said
    )
    assert " a million samples" in said
