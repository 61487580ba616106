"""Rivals of a plan priced again and again, and the work that plans are measured by."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from tests.graphs import BATCH, saved
from tests.planning.test_saved_graphs import SLOW
from tfpar.cluster import Cluster, Device, Level, Node, scale_bandwidth
from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import SolvedCandidate
from tfpar.planning.inter_op.sensitivity import PlanRepricer
from tfpar.planning.inter_op.stages.pipeline_pricing import price_best_schedule
from tfpar.planning.inter_op.stopping import compute_bound_seconds, reaches_compute_bound
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.memory.plan_transforms import apply_memory_transforms
from tfpar.planning.pricing.repricing import reprice_plan
from tfpar.planning.problem import Problem
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepSearch
from tfpar.plans import Plan
from tfpar.spec import Mesh


@functools.cache
def search() -> StepSearch:
    """One for all requests, as in planning."""
    return StepSearch(saved("wide"), BATCH, find_planner("tap"), state_ratio=2.0)


def found(request: PlanRequest) -> tuple[Plan, Problem]:
    return search()(request)


@pytest.mark.slow
@pytest.mark.parametrize("links", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_plan_priced_again_costs_what_it_does_from_the_beginning(links, microbatches):
    request = PlanRequest(Mesh.of([2]), SLOW, pipeline=Pipeline(2, 2))
    plan, problem = found(request)
    again, cluster = (
        PlanRepricer(SolvedCandidate.of(plan, problem), SLOW, BATCH),
        scale_bandwidth(SLOW, links),
    )
    there = problem.with_cluster(scale_bandwidth(problem.cluster, links))
    for recompute in (False, True):
        asked = Pipeline(2, microbatches, recompute=recompute)
        priced = again.price(asked, cluster)
        expected = reprice_plan(plan, asked, there, cluster)
        assert priced.cost == expected.cost and priced.stages == expected.stages
        best, expected = (
            again.schedule(priced, cluster),
            price_best_schedule(expected, there, cluster),
        )
        assert best.cost == expected.cost and best.stages == expected.stages


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_a_plan_with_several_stages_on_each_set_of_ranks_is_priced_again_in_as_many(schedule):
    request = PlanRequest(Mesh.of([2]), SLOW, pipeline=Pipeline(2, 4, schedule))
    plan, problem = found(request)
    again = PlanRepricer(SolvedCandidate.of(plan, problem), SLOW, BATCH)
    priced = again.price(Pipeline(2, 4))
    assert priced.stages.schedule.actors == plan.stages.schedule.actors
    assert priced.cost == plan.cost and again.schedule(priced).cost.seconds <= plan.cost.seconds
    twice = again.price(Pipeline(2, 2))
    assert (twice.microbatches, twice.stages.num_stages) == (2, 4)


def test_a_plan_without_stages_priced_again_costs_what_it_was_found_to():
    request = PlanRequest(Mesh.of([4]), SLOW)
    plan, problem = found(request)
    again = PlanRepricer(SolvedCandidate.of(plan, problem), SLOW, BATCH)
    same = again.price(Pipeline(microbatches=1)).cost
    assert plan.chunks == 1 and same.seconds == pytest.approx(plan.cost.seconds)
    assert same.exposed_s == pytest.approx(plan.cost.exposed_s)
    assert same.memory_bytes == plan.cost.memory_bytes
    slow = again.price(Pipeline(microbatches=2), scale_bandwidth(SLOW, 0.1)).cost
    there = problem.with_cluster(scale_bandwidth(SLOW, 0.1))
    assert slow == reprice_plan(plan, Pipeline(microbatches=2), there, there.cluster).cost


def test_the_work_is_spread_by_speed_over_machines_that_are_not_alike():
    def machine(speed: float) -> Node:
        return Node(Device({"float32": 1e9 * speed}, 2**30, 1e9 * speed))

    mixed = Cluster("mixed", (machine(1), machine(3)), (Level(2, 1e9, 1e-6),))
    request = PlanRequest(Mesh.of([2]), mixed)
    plan, problem = found(request)
    slowest = compute_bound_seconds(problem, PlanRequest(Mesh.of([1]), mixed))
    least = compute_bound_seconds(problem, request)
    assert least == pytest.approx(slowest / 4)
    for seconds, enough in ((1.05 * least, True), (1.5 * least, False)):
        cost = dataclasses.replace(plan.cost, seconds=seconds)
        candidate = SolvedCandidate.of(plan.with_findings(cost=cost), problem)
        assert reaches_compute_bound(candidate, request) == enough


def test_what_the_user_has_recomputed_is_work_of_any_plan():
    """A second forward pass that was asked for is nothing that stages could save."""
    step = StepSearch(saved("gpt"), BATCH, find_planner("tap"), state_ratio=2.0)
    request = PlanRequest(Mesh.of([2]), SLOW, recompute=True)
    plan, problem = step(request)
    assert plan.recompute
    again = apply_memory_transforms(problem, plan.recompute, plan.offloaded)
    least = compute_bound_seconds(again, request)
    assert least > 1.1 * compute_bound_seconds(problem, request)
    cost = dataclasses.replace(plan.cost, seconds=1.05 * least)
    candidate = SolvedCandidate.of(plan.with_findings(cost=cost), problem)
    assert reaches_compute_bound(candidate, request)
