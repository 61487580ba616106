"""What a pipeline promises is what its fastest plan takes in microbatches, shared by the stages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest

from tests.cases import some_first
from tests.planning.problems import Captured
from tfpar.cluster import Cluster, Device, Level, Node
from tfpar.ir import BACKWARD, FORWARD, UPDATE
from tfpar.pipeline import Pipeline
from tfpar.planning.inter_op.relaxed_estimate import estimate_relaxed
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.memory.relayout import fastest_plan
from tfpar.planning.pricing.repricing import price_in_microbatches

FAST = Device({"float32": 4e12}, 16e9, 4e11, launch_s=1e-5, name="fast")
SLOW = dataclasses.replace(FAST, flops={"float32": 1e12}, memory_bandwidth=1e11, name="slow")
MICROBATCHES = 4


def machine(device: Device) -> Cluster:
    return Cluster(device.name, (Node(device, (Level(2, 1e10, 1e-5),)),))


@functools.cache
def asked(pipeline: Pipeline | None, memory_bytes: float = 16e9, model: str = "gpt"):
    cluster = machine(FAST).with_memory(memory_bytes)
    return Captured.saved(model).problem([2], cluster).in_pipeline(pipeline)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "planner"),
    some_first(
        [("gpt", TapPlanner()), ("gpt", RhinoPlanner())],
        itertools.product(("gpt_5_layers", "moe_4_layers"), (TapPlanner(), RhinoPlanner())),
    ),
)
def test_it_is_what_the_unfolded_step_takes_in_microbatches(model, planner):
    pipeline = Pipeline(2, MICROBATCHES)
    problem = asked(pipeline, model=model)
    found = estimate_relaxed(problem, planner, pipeline, {problem.cluster: 2})
    plan = fastest_plan(problem, planner)
    cost = price_in_microbatches(plan, problem).cost
    passes, update = (
        sum(cost.compute_s[p] + cost.communication_s[p] for p in phases)
        for phases in ((FORWARD, BACKWARD), (UPDATE,))
    )
    assert passes > sum(plan.cost.compute_s[p] for p in (FORWARD, BACKWARD)), "more is started"
    expected = passes / 2 * (1 + 1 / MICROBATCHES) + (update + plan.cost.exposed_s) / 2
    assert found.seconds == pytest.approx(expected, rel=0.02)
    assert found.fits
    assert found.least_seconds < found.seconds - found.cost.bubble_s, "of fewer starts"


@pytest.mark.slow
def test_slow_machines_have_the_share_that_they_are_fast_for():
    pipeline = Pipeline(2, MICROBATCHES)
    problem, planner = asked(pipeline), TapPlanner()

    def seconds(*devices):
        kinds = {machine(device): devices.count(device) for device in devices}
        return estimate_relaxed(problem, planner, pipeline, kinds).seconds

    fast, mixed, slow = seconds(FAST, FAST), seconds(FAST, SLOW), seconds(SLOW, SLOW)
    cost = fastest_plan(problem, planner).cost
    once = (cost.compute_s[UPDATE] + cost.communication_s[UPDATE] + cost.exposed_s) / 2
    assert 2 / (mixed - once) == pytest.approx(1 / (fast - once) + 1 / (slow - once))


@pytest.mark.slow
def test_what_does_not_fit_is_computed_again():
    pipeline = Pipeline(2, MICROBATCHES)
    roomy, tight = asked(pipeline), asked(pipeline, 1e5)
    found, again = (
        estimate_relaxed(p, TapPlanner(), pipeline, {p.cluster: 2}) for p in (roomy, tight)
    )
    assert found.fits and not again.fits and again.seconds > found.seconds
    alone = asked(None)
    whole = estimate_relaxed(alone, TapPlanner(), None, {alone.cluster: 1})
    assert whole.seconds == fastest_plan(alone, TapPlanner()).cost.seconds
    assert math.isfinite(whole.memory_fraction) and whole.fits
