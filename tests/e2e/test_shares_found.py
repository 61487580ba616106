"""Shares of the batch that a search finds for steps in microbatches and stages."""

from __future__ import annotations

import dataclasses
import functools

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tfpar.cluster import Cluster, Device, Level, Node

FAST = Device({"float32": 3e9}, 2**34, 3e8, name="fast")
SLOW = dataclasses.replace(FAST, flops={"float32": 1e9}, memory_bandwidth=1e8, name="slow")
MIXED = (FAST, SLOW, FAST, SLOW)
"""With stages in the order of ranks, each has one of both."""

BATCH = 256
DATA_PARALLEL = (tap.batch("data"), tap.replicate(".*"))
HALVES = (*DATA_PARALLEL, tap.stage("dense_[0-2]", 0), tap.stage("dense_[3-6]", 1))


def build() -> keras.Model:
    hidden = [layers.Dense(64, "relu", name=f"dense_{i}") for i in range(6)]
    model = keras.Sequential([*hidden, layers.Dense(8, name="dense_6")])
    model.compile("sgd", "mse")
    return model


@functools.cache
def planned(
    devices: tuple[Device, ...],
    pipeline: tap.Pipeline | str,
    constraints: tuple[object, ...] = HALVES,
) -> tap.Plan:
    keras.utils.clear_session(free_memory=False)
    cluster = Cluster("mixed", tuple(map(Node, devices)), (Level(len(devices), 1e8, 1e-6),))
    batch = np.zeros((BATCH, 64), "float32"), np.zeros((BATCH, 8), "float32")
    return tap.plan(build, batch, [len(devices)], cluster, constraints, pipeline=pipeline)


def check_shares(plan: tap.Plan, more: int, equal: tap.Plan) -> None:
    """The coordinate `more` has the most, the step is the faster for it, and the plan says so.

    Args:
        equal: the same where shares are equal.
    """
    (shares,) = plan.shares.values()
    assert sum(shares) == BATCH and max(shares) == shares[more] > shares[1 - more]
    assert plan.cost.seconds < 0.98 * equal.cost.seconds
    assert f"batch split over data in shares {shares[0]}:{shares[1]}" in plan.summary(full=True)
    assert tap.Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_microbatches_are_shared_out_by_speed():
    accumulated = tap.Pipeline(microbatches=4)
    plan = planned((SLOW, FAST), accumulated, DATA_PARALLEL)
    check_shares(plan, 1, planned((SLOW, SLOW), accumulated, DATA_PARALLEL))
    assert plan.shares["data"][0] % 4 == 0, "as many samples of each microbatch"
    assert not planned((SLOW, SLOW), accumulated, DATA_PARALLEL).shares


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [nightly("1f1b"), "auto"])
def test_stages_of_fast_and_slow_ranks_have_the_same_shares(schedule):
    plan = planned(MIXED, tap.Pipeline(2, 4, schedule))
    check_shares(plan, 0, planned((SLOW,) * 4, tap.Pipeline(2, 4, schedule)))
    assert plan.stages.groups(2) == ((0, 1), (2, 3))
    assert plan.cost.seconds == plan.stages.cost.seconds
    if schedule == "auto":
        assert "picked by simulation" in plan.summary(full=True)
        assert "with equal shares of the batch" in plan.summary(full=True)


@pytest.mark.slow
def test_shares_are_the_best_for_all_stages_together():
    """A fast rank in the lighter stage helps little: its like in the other one is slow."""
    apart = planned((FAST, SLOW, SLOW, FAST), tap.Pipeline(2, 4))
    together = planned(MIXED, tap.Pipeline(2, 4))
    assert apart.cost.seconds > 1.05 * together.cost.seconds
    ((more, fewer),) = together.shares.values()
    assert abs(np.subtract(*apart.shares.get("data", (0, 0)))) < more - fewer


@pytest.mark.slow
def test_stages_that_are_alike_within_have_equal_shares():
    """Fast ranks get more layers instead."""
    assert not planned((FAST, FAST, SLOW, SLOW), tap.Pipeline(2, 4), DATA_PARALLEL).shares


@pytest.mark.slow
def test_stages_of_unlike_ranks_have_shares_of_their_own():
    """Two stages are as slow as their slow rank, until that one has fewer samples: both have to
    change for the step to be faster. A third has one rank."""
    pipeline = tap.Pipeline(ranks=[[0], [1, 2, 3, 4], [5, 6]], microbatches=4)
    stages = (tap.stage(f"dense_{n}", s) for s, n in enumerate(("[01]", "[2-4]", "[56]")))
    laid = (*DATA_PARALLEL, *stages)
    plan = planned((FAST, FAST, FAST, SLOW, FAST, SLOW, FAST), pipeline, laid)
    equal = planned((FAST, FAST, FAST, SLOW, SLOW, SLOW, SLOW), pipeline, laid)
    alone, four, two = (one.shares.get("data") for one in plan.by_layout)
    assert alone is None and sum(four) == sum(two) == BATCH
    assert four[2] < min(four[0], four[1], four[3]) and two[0] < two[1]
    assert plan.cost.seconds < 0.98 * equal.cost.seconds
    text = plan.summary(full=True)
    for shares, mesh in ((four, "data=4"), (two, "data=2")):
        said = f"batch split over data in shares {':'.join(map(str, shares))} on {mesh}"
        assert said in text
    assert tap.Plan.from_json(plan.to_json()) == plan
    assert not any(one.shares for one in planned((SLOW,) * 7, pipeline, laid).by_layout)


@pytest.mark.slow
def test_each_rank_has_to_have_room_for_its_share():
    """A fast rank that could not hold more samples than the slow one keeps shares equal."""
    pipeline = tap.Pipeline(2, 4)
    plan = planned(MIXED, pipeline)
    equal = planned((SLOW,) * 4, pipeline)
    peaks = [max(s.peak_bytes for s in p.stages.cost.stages) for p in (plan, equal)]
    assert peaks[0] > peaks[1], "of the rank with the most samples"
    small = dataclasses.replace(FAST, memory_bytes=(peaks[0] + 3 * peaks[1]) / 4)
    tight = planned((small, SLOW, small, SLOW), pipeline)
    for shares in (plan.shares["data"], tight.shares.get("data", (BATCH // 2,) * 2)):
        assert shares[0] >= BATCH // 2
    assert tight.shares.get("data", (0,))[0] < plan.shares["data"][0]
    assert tight.stages.cost.fits


@pytest.mark.nightly
def test_pipelines_that_are_found_are_compared_with_their_shares():
    """What a rank waits for is that of the slowest ranks, with their share."""
    plan = planned(MIXED, "auto", HALVES)
    check_shares(plan, 0, planned((SLOW,) * 4, "auto", HALVES))
    cost = plan.cost
    waiting = sum(cost.communication_s) - cost.hidden_s + cost.exposed_s + cost.transfer_s
    assert sum(cost.compute_s) + waiting + cost.bubble_s == pytest.approx(cost.seconds)
    assert plan.findings.rivals[0].cost.seconds > cost.seconds
