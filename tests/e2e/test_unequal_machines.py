"""Pipelines over machines that differ: faster ones get more layers."""

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
from tfpar.spec import MemoryLimitError, format_bytes

FAST = Device({"float32": 4e12}, 2**34, 4e11, 1e-6, name="fast")
SLOW = dataclasses.replace(FAST, flops={"float32": 1e12}, memory_bandwidth=1e11, name="slow")


def build() -> keras.Model:
    model = keras.Sequential([layers.Dense(512, "relu", name=f"dense_{i}") for i in range(10)])
    model.compile("sgd", "mse")
    return model


@functools.cache
def planned(
    devices: tuple[Device, ...], *constraints, pipeline: tap.Pipeline | str | None = None
) -> tap.Plan:
    cluster = Cluster("two machines", tuple(map(Node, devices)), (Level(2, 1e10, 1e-6),))
    batch = np.zeros((256, 512), "float32"), np.zeros((256, 512), "float32")
    pipeline = pipeline or tap.Pipeline(2, 4)
    return tap.plan(build, batch, [2], cluster, constraints=constraints, pipeline=pipeline)


def kernels(plan: tap.Plan) -> list[int]:
    """By stage."""
    stages = [stage for name, stage in plan.stages.owners.items() if name.endswith("kernel")]
    return [stages.count(stage) for stage in range(plan.stages.num_stages)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices, expected", [((FAST, SLOW), [8, 2]), nightly((SLOW, FAST), [2, 8])]
)
def test_the_faster_machine_gets_more_layers(devices, expected):
    plan = planned(devices)
    assert kernels(plan) == expected
    halves = planned(devices, tap.stage("dense_[0-4]", 0), tap.stage("dense_[5-9]", 1))
    assert kernels(halves) == [5, 5]
    assert plan.cost.seconds == plan.stages.cost.seconds < 0.7 * halves.cost.seconds


@pytest.mark.slow
def test_machines_that_are_alike_get_the_same():
    assert kernels(planned((FAST, FAST))) == kernels(planned((SLOW, SLOW))) == [5, 5]


def small(bytes_of_each: list[float]) -> tuple[Device, ...]:
    return tuple(dataclasses.replace(FAST, memory_bytes=size) for size in bytes_of_each)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", nightly("auto")])
def test_a_stage_on_small_devices_gets_what_fits_there(schedule):
    """Each stage has the memory of its own devices: not the least of all, nor the most."""
    pipeline = tap.Pipeline(2, 4, schedule)
    free = planned((FAST, FAST), pipeline=pipeline)
    assert kernels(free) == [5, 5]
    needed = max(share.peak_bytes for share in free.stages.cost.stages)
    for stage in (0, 1):
        limits = [1.6 * needed, 1.6 * needed]
        limits[stage] = 0.7 * needed
        plan = planned(small(limits), pipeline=pipeline)
        assert kernels(plan)[stage] < 5
        shares = plan.stages.cost.stages
        assert [share.limit_bytes for share in shares] == limits
        assert all(share.peak_bytes <= share.limit_bytes for share in shares)
        assert shares[1 - stage].peak_bytes > limits[stage]
        assert plan.cost.seconds < 1.5 * free.cost.seconds
        assert tap.Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_what_each_stage_may_store_is_told():
    needed = planned((FAST, FAST)).cost.memory_bytes
    limits = [0.7 * needed, 2 * needed]
    plan = planned(small(limits))
    shown = plan.summary(full=True)
    for share in plan.stages.cost.stages:
        assert f"{format_bytes(share.peak_bytes)} of {format_bytes(share.limit_bytes)}" in shown
    halves = tap.stage("dense_[0-4]", 0), tap.stage("dense_[5-9]", 1)
    message = f"a rank of stage 0 stores .* of {format_bytes(limits[0])} that it may"
    with pytest.raises(MemoryLimitError, match=message):
        planned(small(limits), *halves)


@pytest.mark.slow
def test_a_pipeline_that_is_found_keeps_to_the_memory_of_each_stage():
    needed = planned((FAST, FAST)).cost.memory_bytes
    plan = planned(small([0.6 * needed, 2 * needed]), pipeline="auto")
    assert kernels(plan)[0] < kernels(plan)[1] and plan.stages.cost.fits
