"""Pipelines over machines that differ: faster ones get more layers."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tfpar.cluster.description import Cluster, Device, Level, Node

FAST = Device({"float32": 4e12}, 2**34, 4e11, 1e-6, name="fast")
SLOW = dataclasses.replace(FAST, flops={"float32": 1e12}, memory_bandwidth=1e11, name="slow")


def build() -> keras.Model:
    model = keras.Sequential([layers.Dense(512, "relu", name=f"dense_{i}") for i in range(10)])
    model.compile("sgd", "mse")
    return model


def planned(devices: tuple[Device, ...], *constraints) -> tap.Plan:
    cluster = Cluster("two machines", tuple(map(Node, devices)), (Level(2, 1e10, 1e-6),))
    batch = np.zeros((256, 512), "float32"), np.zeros((256, 512), "float32")
    pipeline = tap.Pipeline(2, 4)
    return tap.plan(build, batch, [2], cluster, constraints=constraints, pipeline=pipeline)


def kernels(plan: tap.Plan) -> list[int]:
    """By stage."""
    stages = [stage for name, stage in plan.stages.owners.items() if name.endswith("kernel")]
    return [stages.count(stage) for stage in range(plan.stages.num_stages)]


@pytest.mark.parametrize("devices, expected", [((FAST, SLOW), [8, 2]), ((SLOW, FAST), [2, 8])])
def test_the_faster_machine_gets_more_layers(devices, expected):
    plan = planned(devices)
    assert kernels(plan) == expected
    halves = planned(devices, tap.stage("dense_[0-4]", 0), tap.stage("dense_[5-9]", 1))
    assert kernels(halves) == [5, 5]
    assert plan.cost.seconds == plan.stages.cost.seconds < 0.7 * halves.cost.seconds


def test_machines_that_are_alike_get_the_same():
    assert kernels(planned((FAST, FAST))) == kernels(planned((SLOW, SLOW))) == [5, 5]
