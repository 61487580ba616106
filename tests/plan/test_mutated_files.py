"""A plan or cluster file with something changed in it loads, and all works, or it is refused."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings

import tfpar as tap
from tests.cases import amounts
from tests.plan.mutations import mutated, mutated_text
from tfpar.cluster.description import Measured
from tfpar.cluster.files import cluster_of, cluster_text, describe, read_cluster, write_cluster
from tfpar.cluster.named import find_cluster
from tfpar.cost.cost import Cost
from tfpar.cost.staged import StagedCost, StageShare
from tfpar.pipeline.generators import generate
from tfpar.plans import (
    Alternative,
    Offloaded,
    Plan,
    PlannedStages,
    PlannedVariable,
    PricedPlan,
)
from tfpar.propagation.partitioned import OpPlan
from tfpar.spec import Mesh, PlanError, TfparError, parse_spec

MESH = Mesh.of([2, 2])


def planned() -> Plan:
    """A plan with something in every field."""
    laid, rows = parse_spec("R,S(1)"), parse_spec("S(0),R")
    alternatives = (
        Alternative(laid, 1e-3),
        Alternative(rows, math.inf),
        Alternative(parse_spec("R,S(0),R"), 2e-3, "data=1 x d1=2 x d2=2, batch over data"),
    )
    variables = {
        "m/a/kernel": PlannedVariable((6, 8), "float32", True, laid, "searched", alternatives),
        "m/a/bias": PlannedVariable((8,), "float32", True, rows),
        "m/b/kernel": PlannedVariable((8, 2), "float32", True),
        "adam/m": PlannedVariable((6, 8), "float32", False),
    }
    whole = parse_spec("R,R")
    return Plan(
        MESH,
        ("data",),
        variables,
        {"m/a/add:0": rows},
        ("batch('data')",),
        "abc",
        planner="tap",
        cluster=find_cluster("dgx-a100", MESH),
        layouts=(PricedPlan("data=4", 2e-3, 1e9),),
        cost=Cost(
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
        ),
        recompute=("block",),
        offloaded=Offloaded(("m/a/kernel",), ("block",)),
        chunks=2,
        ops={"m/a/MatMul": OpPlan((whole, laid), (laid,), (whole,))},
    )


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
        (Measured("all_reduce", (2, 4), 1, 1e-6, 1e9),),
        1e-4,
        True,
    )


PLAN = planned()
TEXT = PLAN.to_json()


def use_plan(text: str) -> None:
    try:
        plan = Plan.from_json(text)
    except TfparError:
        return
    assert plan.summary() and all(map(plan.explain, plan.variables))
    assert plan.diff(plan) == [] and len(plan.diff(PLAN)) == len(PLAN.diff(plan))
    again = plan.to_json()
    json.loads(again, parse_constant=pytest.fail)
    assert Plan.from_json(again) == plan and Plan.from_json(again).to_json() == again


def use_cluster(described: object) -> None:
    try:
        found = cluster_of(described, "mutated")
    except TfparError:
        return
    assert found.device and found.shape_text() and found.fingerprint() and hash(found)
    again = json.loads(json.dumps(describe(found)), parse_constant=pytest.fail)
    assert cluster_of(again) == found


def use_cluster_file(folder, text: str) -> None:
    path = folder / "mutated.toml"
    path.write_text(text, encoding="utf-8")
    try:
        found = read_cluster(path)
    except TfparError:
        return
    use_cluster(describe(found))
    write_cluster(found, path)
    assert read_cluster(path) == found


def fuzzed(use, strategy, examples: int) -> None:
    checks = list(HealthCheck)
    quickly = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=checks,
    )
    quickly(given(strategy)(use))()


@pytest.mark.parametrize("examples", amounts(100, 2000))
def test_mutated_plans_load_and_work_or_are_refused(examples):
    use_plan(TEXT)
    fuzzed(use_plan, mutated(json.loads(TEXT)).map(json.dumps), examples)
    fuzzed(use_plan, mutated_text(TEXT), examples // 4)


@pytest.mark.parametrize("examples", amounts(100, 2000))
def test_mutated_stages_load_and_work_or_are_refused(examples):
    share = StageShare((0, 1, 2, 3), 1e-3, 2e-3, 1e-4, 0.0, 0.2, 1e6, 2, 1e6, 1e5, 2e6, "0B0")
    stages = PlannedStages(
        generate("zb-h1", 2, 2),
        {"m/a": 0, "m/b": 1},
        True,
        {"m/a/kernel": 0, "m/b/kernel": 1},
        StagedCost(1e-2, 0.2, (share, dataclasses.replace(share, ranks=(4, 5, 6, 7)))),
    )
    fields = json.loads(
        dataclasses.replace(PLAN, chunks=1, microbatches=2, stages=stages).to_json()
    )
    use_plan(json.dumps(fields))

    def use(stages: object) -> None:
        use_plan(json.dumps({**fields, "stages": stages}))

    fuzzed(use, mutated(fields["stages"]), examples)


@pytest.mark.parametrize("examples", amounts(100, 2000))
def test_mutated_clusters_load_and_work_or_are_refused(examples, tmp_path):
    use_cluster(describe(cluster()))
    fuzzed(use_cluster, mutated(describe(cluster())), examples)
    text = cluster_text(cluster())
    use_cluster_file(tmp_path, text)
    fuzzed(lambda text: use_cluster_file(tmp_path, text), mutated_text(text), examples // 4)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: p["cost"].update(seconds=math.nan), "cost.seconds is nan"),
        (lambda p: p["cost"].update(seconds="1 ms"), "cost.seconds is '1 ms'"),
        (lambda p: p["cost"].update(compute_s=[1.0, 2.0]), "cost.compute_s is .*must be 3 numbers"),
        (lambda p: p["cost"].update(hours=1.0), "unexpected keyword argument 'hours'"),
        (lambda p: p.update(cost=7), "cost is 7"),
        (lambda p: p.update(cluster=0), "cluster"),
        (lambda p: p.update(layouts=[["data=4"]]), "layouts is .*must be a list of 3"),
        (lambda p: p.update(layouts=[["data=4", None]]), "layouts is None"),
        (lambda p: p.update(batch_axes="data"), "batch_axes is 'data'; it must be a list"),
        (lambda p: p.update(chunks=True), "chunks is True"),
        (lambda p: p.update(cut_short="no"), "cut_short is 'no'; it must be True or False"),
        (lambda p: p.update(mesh=[["data", 2**31]]), "at most"),
        (
            lambda p: p["variables"]["m/a/kernel"]["alternatives"].append(["R,R", "soon", ""]),
            r"variables\['m/a/kernel'\].alternatives\[3\], seconds, is 'soon'",
        ),
        (
            lambda p: p["variables"]["m/a/kernel"]["alternatives"].append(["R", 1.0, ""]),
            "alternative R for variable 'm/a/kernel'.* does not fit data=2 x model=2",
        ),
        (
            lambda p: p["variables"]["m/a/bias"].update(trainable=1),
            r"variables\['m/a/bias'\].trainable is 1; it must be True or False",
        ),
        (lambda p: p["ops"]["m/a/MatMul"].update({"in": "R,R"}), "MatMul'].in is 'R,R'"),
        (lambda p: p["tensors"].update({"m/a/add:0": "S(0/0),R"}), "stride is 0"),
    ],
)
def test_what_is_wrong_in_a_plan_file_is_named(change, message):
    fields = json.loads(TEXT)
    change(fields)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(fields))
