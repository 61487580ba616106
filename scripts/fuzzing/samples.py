"""Samples to mutate: plans, clusters and steps with something in every field."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import tfpar as tap
from tests.plan.graphs import partition
from tests.planning import tiny
from tfpar.cluster.description import MeasuredCollective
from tfpar.cluster.files import describe
from tfpar.cluster.lookup import find_cluster
from tfpar.cluster.scaling import Correction
from tfpar.constraints import Constraint
from tfpar.cost.cost import Cost
from tfpar.cost.pipeline_cost import PipelineCost, StageCost
from tfpar.ir.graph import Graph
from tfpar.observability.report.data.build import build_report
from tfpar.pipeline.generators import generate
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.problem import Problem
from tfpar.plans import (
    Candidate,
    Findings,
    OffloadPlan,
    PipelinePlan,
    Plan,
    PlannedVariable,
    SpecOption,
    plan_from_constraints,
)
from tfpar.propagation.partitioned_graph import OpPlan
from tfpar.spec import Mesh, parse_spec

MESH = Mesh.of([2, 2])

HINTS = """
[[shard]]
pattern = "layer_1/kernel"
dim = 1
axis = "model"

[[shard]]
pattern = "layer_2/kernel"
dim = -2
axis = "model"
stride = 2

[replicate]
pattern = "head/.*"

[[fsdp]]
axis = "data"
pattern = "layer_3/kernel"
stage = 2

[[shard_output]]
pattern = "layer_1"
dim = 1
axis = "model"

[[shard_output]]
pattern = "layer_2"
axis = "model"

[batch]
axes = ["data"]

[[stage]]
pattern = "head"
index = 1

[[keep]]
plan = "old.json"
pattern = "m/a/kernel"
"""
"""Constraints of every kind; `old.json` is `planned()`."""


def planned() -> Plan:
    """A plan with something in every field."""
    laid, rows = parse_spec("R,S(1)"), parse_spec("S(0),R")
    alternatives = (
        SpecOption(laid, 1e-3),
        SpecOption(rows, math.inf),
        SpecOption(parse_spec("R,S(0),R"), 2e-3, "data=1 x d1=2 x d2=2, batch over data"),
    )
    variables = {
        "m/a/kernel": PlannedVariable((6, 8), "float32", True, laid, "searched", alternatives),
        "m/a/bias": PlannedVariable((8,), "float32", True, rows),
        "m/b/kernel": PlannedVariable((8, 2), "float32", True),
        "adam/m": PlannedVariable((6, 8), "float32", False),
    }
    whole = parse_spec("R,R")
    cost = Cost(
        1e-3,
        (1e-4, 2e-4, 1e-4),
        (1e-4, 1e-4, 0.0),
        1e-4,
        5e-5,
        2**20,
        100.0,
        200.0,
        100.0,
        50.0,
        120.0,
        1e-5,
    )
    return Plan(
        MESH,
        ("data",),
        variables,
        {"m/a/add:0": rows},
        ("batch('data')",),
        "abc",
        planner="tap",
        cluster=find_cluster("dgx-a100", MESH),
        recompute=("block",),
        offloaded=OffloadPlan(("m/a/kernel",), ("block",)),
        chunks=2,
        findings=Findings(
            cost=cost,
            layouts=(Candidate("data=4", 2e-3, 1e9),),
            baselines=(Candidate("one device", 3e-3, 2e9),),
            rivals=(
                dataclasses.replace(
                    Candidate.priced("model=4", cost), reason="slower", links=2.0, corrected_s=4e-3
                ),
                Candidate("data=4", reason="does not fit"),
            ),
            trials=(
                Candidate("data=2 x model=2", 1e-3, measured_s=2e-3, corrected_s=2.1e-3),
                Candidate("data=4", reason="failed"),
            ),
            correction=Correction(3.0, 1.0, 0.5, {"T4": 6.0}),
            passed_over=(2e-3, 7),
        ),
        ops={"m/a/MatMul": OpPlan((whole, laid), (laid,), (whole,))},
    )


def planned_in_stages() -> Plan:
    """The same in two stages."""
    share = StageCost((0, 1, 2, 3), 1e-3, 2e-3, 1e-4, 0.0, 0.2, 1e6, 2, 1e6, 1e5, 2e6, "0B0")
    stages = PipelinePlan(
        generate("zb-h1", 2, 2),
        {"m/a": 0, "m/b": 1},
        True,
        {"m/a/kernel": 0, "m/b/kernel": 1},
        PipelineCost(1e-2, 0.2, (share, dataclasses.replace(share, ranks=(4, 5, 6, 7)))),
    )
    plan = planned().with_findings(trials=())
    return dataclasses.replace(plan, chunks=1, microbatches=2, stages=stages)


def cluster() -> tap.Cluster:
    """A cluster with something in every field."""
    rates = {"float32": 1e13, "float16": 2e13}
    fast = tap.Device(rates, 16e9, 5e11, 4e-6, 100.0, "gpu", 1e9, 2e10, 2e-5)
    inside = (tap.Level(4, 1e10, 1e-6, "ring", 1e9, "nv"),)
    nodes = (tap.Node(fast, inside, 2, 1e9), tap.Node(tap.Device({"float32": 1e13}, 8e9, 5e11)))
    return tap.Cluster(
        "ours",
        nodes,
        (tap.Level(3, 1e9, 1e-6),),
        0.5,
        ("ring", "tree"),
        (MeasuredCollective("all_reduce", (2, 4), 1, 1e-6, 1e9),),
        1e-4,
        True,
    )


def described_cluster() -> dict[str, Any]:
    """The same as JSON has it."""
    return describe(cluster())


@functools.cache
def step(batch: int) -> Graph:
    """A training step of two layers."""
    return tiny.chain(batch, 16, 64, 16)


@functools.cache
def problem(batch: int) -> Problem:
    """What there is to plan of it, on four ranks."""
    return tiny.problem(step(batch), [2, 2])


@functools.cache
def planned_with_report() -> Plan:
    """A plan that was searched, with what there is to show of it, as a file has it."""
    plan = TapPlanner().solve(problem(8))
    report = build_report(plan, partition(step(8), plan))
    return plan.with_report(report.to_builtins())


def constrained(constraints: Iterable[Constraint]) -> Plan:
    """The plan that constraints alone make of the step."""
    return plan_from_constraints(step(8), MESH, tuple(constraints))
