"""`price_plan` gives every plan that is found the cost that it was found with."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from tests.cases import some_first
from tests.graphs import BATCH, saved
from tfpar.cluster import Cluster, Device, Level, Node, find_cluster
from tfpar.constraints import batch
from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import SolvedCandidate
from tfpar.planning.inter_op.sensitivity import PlanRepricer
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.pricing.price import price_plan
from tfpar.planning.pricing.repricing import reprice_plan
from tfpar.planning.problem import Problem
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepSearch
from tfpar.plans import Offload, Plan
from tfpar.spec import Mesh


def machines(speeds: tuple[float, ...] = (1, 1, 1, 1), overlap: float = 0.0) -> Cluster:
    """Four machines, so slow that small models are worth splitting."""
    devices = [
        Device({"float32": 1e9 * speed}, 2**30, 1e9 * speed, 1e-7, host_bandwidth=1e9)
        for speed in speeds
    ]
    return Cluster("some", tuple(map(Node, devices)), (Level(4, 1e10, 1e-6),), overlap=overlap)


PIPELINES = {
    "whole": None,
    "microbatches": Pipeline(microbatches=2),
    "stages": Pipeline(2, 2),
    "stages again": Pipeline(2, 4, recompute=True),
}
CLUSTERS = {
    "alike": machines(),
    "overlapping": machines(overlap=1.0),
    "unequal": machines((1, 3, 1, 3)),
}
WAYS = {
    "plain": {},
    "xla": {"jit_compile": True},
    "recomputing": {"recompute": True},
    "offloading": {"offload": Offload(True, True)},
    "compressed": {"compression": "float16"},
    "data parallel": {"constraints": (batch("data"),)},  # in unequal shares, of unequal machines
}
EVERY = [*itertools.product(PIPELINES, CLUSTERS, WAYS, ("tap", "rhino"))]
SOME = [
    ("whole", "alike", "xla", "rhino"),
    ("whole", "unequal", "data parallel", "tap"),
    ("microbatches", "alike", "offloading", "tap"),
    ("microbatches", "unequal", "data parallel", "rhino"),
    ("stages", "overlapping", "compressed", "tap"),
    ("stages again", "unequal", "data parallel", "tap"),
    ("stages", "alike", "recomputing", "rhino"),
]


def found(
    request: PlanRequest, name: str = "wide", planner: str = "tap", size: int = BATCH
) -> tuple[Plan, Problem]:
    search = StepSearch(saved(name), size, find_planner(planner), state_ratio=2.0)
    return search(request)


def request_of(pipeline: str, cluster: str, way: str) -> PlanRequest:
    asked, options = PIPELINES[pipeline], WAYS[way]
    lengths = (2, 2) if asked is None or asked.order.num_actors == 1 else (2,)
    named = {"data": lengths[0] * (lengths[-1] if len(lengths) > 1 else 1)}
    mesh = Mesh.of(named if "constraints" in options else [*lengths])
    return PlanRequest(mesh, CLUSTERS[cluster], pipeline=asked, **options)


def assert_same_price(priced: Plan | None, plan: Plan) -> None:
    """Every figure, to the last digit that another order of sums leaves."""
    assert priced is not None
    assert_same(priced.cost, plan.cost)
    if plan.stages is not None:
        one, other = (dataclasses.asdict(p.stages.cost) for p in (priced, plan))
        one["schedules"] = other["schedules"]  # that the one in force was chosen from
        assert_same(one, other)


def assert_same(one: object, other: object) -> None:
    assert [*leaves(one)] == [
        pytest.approx(leaf, rel=1e-13) if isinstance(leaf, float) else leaf
        for leaf in leaves(other)
    ]


def leaves(value: object) -> Iterator[object]:
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    else:
        yield value


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "cluster", "way", "planner"), some_first(SOME, EVERY))
def test_a_plan_costs_what_it_was_found_with(pipeline, cluster, way, planner):
    request, in_shares = request_of(pipeline, cluster, way), way == "data parallel"
    plan, problem = found(request, "resnet" if in_shares else "wide", planner)
    if (pipeline, planner) == ("whole", "tap"):
        assert bool(plan.shares) == (cluster == "unequal" and in_shares)
    assert_same_price(price_plan(plan, problem, request.cluster, BATCH), plan)


@pytest.mark.slow
def test_chunks_cost_what_they_were_found_with_and_give_way_to_microbatches():
    step = saved("gpt_wide")
    size = step.graph.inputs[0].shape[0]
    mesh = Mesh.of({"data": 1, "model": 8})
    request = PlanRequest(mesh, find_cluster("rhino-m8", mesh), (batch("data"),))
    plan, problem = found(request, "gpt_wide", size=size)
    assert plan.chunks == 2
    assert_same_price(price_plan(plan, problem, request.cluster, size), plan)
    again = PlanRepricer(SolvedCandidate.of(plan, problem), request.cluster, size)
    assert_same_price(again.price(Pipeline(microbatches=1)), plan)
    assert_same_price(reprice_plan(plan, Pipeline(microbatches=1), problem, request.cluster), plan)
    halves = reprice_plan(plan, Pipeline(microbatches=2), problem, request.cluster)
    assert (halves.chunks, halves.microbatches) == (1, 2)
