"""Pipelines on machines that differ: which of them make up which stage is found, too."""

from __future__ import annotations

import dataclasses
import functools

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.equivalence import assert_equivalent, op_by_op, train
from tfpar.cluster import Cluster, Device, Level, Node, cluster_of
from tfpar.spec import MemoryLimitError, PlanError

FAST = Device({"float32": 4e9}, 2**34, 4e9, 1e-6, name="fast")
SLOW = dataclasses.replace(FAST, flops={"float32": 1e9}, memory_bandwidth=1e9, name="slow")
PIPELINE = tap.Pipeline(2, 4)
IN_ORDER = tap.stage("first", 0)
"""A constraint on stages, with which machines stay as they are given."""


def machines(*devices: Device) -> Cluster:
    return Cluster("mixed", tuple(map(Node, devices)), (Level(len(devices), 1e9, 1e-6),))


MIXED = machines(FAST, SLOW, FAST, SLOW)


def build(width: int = 64) -> keras.Model:
    names = ["first", *(f"fc{i}" for i in range(6))]
    hidden = [layers.Dense(width, "tanh", name=name) for name in names]
    model = keras.Sequential([keras.Input((16,)), *hidden, layers.Dropout(0.2, seed=1)])
    model.add(layers.Dense(2, name="last"))
    model.compile("adam", "mse", jit_compile=False)
    return model


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 16)).astype("f4"), rng.normal(size=(count, 2)).astype("f4")


@functools.cache
def planned(cluster: Cluster, *constraints, stages: int = 2, batch: int = 256) -> tap.Plan:
    asked = {"constraints": constraints, "pipeline": tap.Pipeline(stages, 4), "planner": "tap"}
    return tap.plan(build, rows(batch), [cluster.size], cluster, **asked)


@pytest.mark.slow
def test_slow_machines_between_fast_ones_make_up_a_stage_of_their_own():
    plan, given = planned(MIXED), planned(MIXED, IN_ORDER)
    assert given.stages.ranks == () and plan.stages.ranks in {(0, 2, 1, 3), (1, 3, 0, 2)}
    assert [share.ranks for share in plan.stages.cost.stages] == [
        plan.stages.ranks[:2],
        plan.stages.ranks[2:],
    ]
    # Ranks that differ within stages have unequal shares there, which makes up for most of it.
    assert given.shares and not plan.shares and plan.cost.seconds < given.cost.seconds
    kernels = [s for name, s in plan.stages.owners.items() if name.endswith("kernel")]
    assert kernels.count(plan.stages.ranks.index(0) // 2) > len(kernels) / 2
    assert tap.Plan.from_json(plan.to_json()) == plan
    assert any(line.startswith("ranks of stages: [") for line in plan.diff(given))
    shown = plan.summary(full=True)
    assert shown.count("| 0, 2 ") == shown.count("| 1, 3 ") == 2


@pytest.mark.nightly
def test_a_pipeline_that_is_found_costs_as_on_machines_given_in_its_order():
    """What its ranks wait for, too."""
    asked = {"pipeline": "auto", "planner": "tap"}
    nodes = Node(FAST), Node(FAST, uplink=2e7), Node(FAST)
    mixed = Cluster("one slow uplink", nodes, (Level(3, 1e8, 1e-6),))
    plan = tap.plan(build, rows(256), [3], mixed, **asked)
    ranks = plan.stages.ranks
    assert ranks and ranks != (0, 1, 2)
    ordered = dataclasses.replace(mixed, nodes=tuple(mixed.nodes[rank] for rank in ranks))
    given = tap.plan(build, rows(256), [3], ordered, **asked)
    assert given.stages.ranks == () and given.stages.schedule == plan.stages.schedule
    assert plan.cost == given.cost and plan.cost.transfer_s > 0


@pytest.mark.slow
def test_a_slow_link_is_not_in_the_middle():
    """A machine with a slow link, second of four in the file, has a neighbour on one side alone."""
    fields = {
        "name": "one slow uplink",
        "level": [{"count": 4, "bandwidth": "10 GB/s", "latency": "1 us"}],
    }
    machine = {"device": {"flops": {"float32": 4e9}, "memory": "16 GB", "memory_bandwidth": 4e9}}
    nodes = [machine, {**machine, "uplink": "4 MB/s"}, {**machine, "count": 2}]
    cluster = cluster_of({**fields, "node": nodes}, "the test's cluster")
    plan = planned(cluster, stages=4)
    given = planned(cluster, IN_ORDER, stages=4)
    assert plan.stages.ranks in {(1, 0, 2, 3), (0, 2, 3, 1)}
    assert plan.cost.seconds < 0.9 * given.cost.seconds


@pytest.mark.slow
def test_machines_that_are_alike_stay_as_they_are():
    assert planned(machines(FAST, FAST, FAST, FAST)).stages.ranks == ()


@pytest.mark.slow
def test_an_order_that_is_as_good_is_kept():
    assert planned(machines(SLOW, SLOW, FAST, FAST)).stages.ranks == ()


@pytest.mark.nightly
def test_large_machines_take_what_fits_nowhere_else():
    """The first stage holds more microbatches: no assignment fits as machines are given."""
    needed = planned(machines(FAST, FAST)).stages.cost.stages
    limits = [0.1 * needed[0].peak_bytes, 2 * needed[0].peak_bytes]
    small, large = (dataclasses.replace(FAST, memory_bytes=limit) for limit in limits)
    with pytest.raises(MemoryLimitError):
        planned(machines(small, large, small, large), IN_ORDER)
    plan = planned(machines(small, large, small, large))
    assert plan.stages.cost.fits and plan.stages.ranks in {(0, 2, 1, 3), (1, 3, 0, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", nightly("auto")])
def test_a_placed_pipeline_computes_what_one_device_does(schedule):
    parallel, plain = assert_equivalent(
        build,
        rows(28),  # the last batch is smaller
        tap.split([4]),
        planner="tap",
        cluster=MIXED,
        options={"pipeline": tap.Pipeline(2, 4, schedule)},
        batch_size=16,
    )
    plan = tap.plan_of(parallel.model)
    assert plan.stages.ranks in {(0, 2, 1, 3), (1, 3, 0, 2)}
    groups = plan.stages.groups(2)
    for variable in parallel.model.trainable_variables:
        stage = plan.stages.owners[variable.path]
        assert variable._value.ranks.members == groups[stage]
    x, y = rows(20)
    scores = [m.evaluate(x, y, batch_size=8, verbose=0) for m in (parallel.model, plain.model)]
    np.testing.assert_allclose(*scores, rtol=1e-4)
    predicted = [m.predict(x, batch_size=8, verbose=0) for m in (parallel.model, plain.model)]
    np.testing.assert_allclose(*predicted, rtol=1e-3, atol=1e-5)


@pytest.mark.nightly
def test_a_plan_from_a_file_is_placed_as_it_says(tmp_path):
    plan = planned(MIXED, batch=16)
    plan.save(tmp_path / "plan.json")
    loaded = tap.Plan.load(tmp_path / "plan.json")
    plain = train(op_by_op(build), rows(16), batch_size=16)
    trained = train(
        build,
        rows(16),
        mesh=tap.split([4]),
        start=plain.start,
        options={"plan": loaded},
        batch_size=16,
    )
    np.testing.assert_allclose(trained.losses, plain.losses, rtol=1e-4)
    assert tap.plan_of(trained.model).stages.ranks == plan.stages.ranks


@pytest.mark.slow
def test_what_was_evaluated_before_stays_where_it_is():
    """Variables lie on the ranks in their order once a step that trains nothing has run."""
    x, y = rows(16)
    with tap.auto_parallel(tap.split([4]), planner="tap", cluster=MIXED, pipeline=PIPELINE):
        model = build()
    before = model.evaluate(x, y, batch_size=16, verbose=0)
    history = model.fit(x, y, batch_size=16, verbose=0)
    assert tap.plan_of(model).stages.ranks == ()
    assert np.isfinite(before) and np.isfinite(history.history["loss"][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, message",
    [
        ((0, 2, 1), "each once, for sets of 2 . 2"),
        ((0, 2, 1, 4), "each once, for sets of 2 . 2"),
        ((0, 0, 1, 2), "each once, for sets of 2 . 2"),
        ((2, 0, 1, 3), "they ascend"),
        ((0, 1), "each once, for sets of 2 . 2"),
    ],
)
def test_ranks_that_stages_cannot_have(ranks, message):
    plan = planned(MIXED, IN_ORDER)
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(plan, stages=dataclasses.replace(plan.stages, ranks=ranks))
