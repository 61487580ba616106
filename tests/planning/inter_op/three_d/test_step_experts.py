"""Experts over copies as a degree of the layouts of a captured step."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from tests.clusters import device, two_levels
from tests.planning.problems import Captured, laid
from tfpar.cluster import Cluster, Link
from tfpar.pipeline import AUTO, Pipeline
from tfpar.planning.candidates import name_of_plan
from tfpar.planning.inter_op.strategy_search import plans_of_layouts, strategy_pipeline
from tfpar.planning.inter_op.three_d.cost_table import LayerLayout, LayoutDegrees
from tfpar.planning.inter_op.three_d.from_step import step_table
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.searches import Ranked, ranked_strategies
from tfpar.planning.inter_op.three_d.strategy import Strategy3D
from tfpar.planning.inter_op.three_d.time_terms import exchange_seconds, packed
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.pipeline_search import ALL, search_step
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepSearch
from tfpar.plans import Plan
from tfpar.spec import Mesh

MESH, BATCH = Mesh.of([2, 2]), 16
NARROW, FAR = Link(3e6, 1e-7), Link(1e9, 1e-4)
"""Between the devices of a machine: where gradients take long, and where each exchange does."""

PLAIN, SPREAD, SPLIT = LayoutDegrees(2, 1), LayoutDegrees(2, 1, 2), LayoutDegrees(1, 2)


def machines(link: Link) -> Cluster:
    one = device(1e9, 1e9, 1e11, 1e9, 1e-7)
    return two_levels("pairs", 2, 2, one, link, Link(1e6, link.latency_s))


@functools.cache
def search() -> StepSearch:
    captured = Captured.saved("mixture")
    return StepSearch(captured.step, BATCH, find_planner("tap"), state_ratio=2.0)


@functools.cache
def model(link: Link) -> StrategyProblem:
    """For stages of two ranks."""
    cluster = machines(link)
    plans = plans_of_layouts(search(), PlanRequest(MESH, cluster), [2])
    table = step_table(plans, BATCH, dict.fromkeys(plans, BATCH), cluster, shards=True)
    return StrategyProblem(table, cluster, BATCH)


def plans(link: Link):
    return model(link).table.kinds["layer 0"].prices.plans


def planned(link: Link, strategy: Strategy3D) -> Plan:
    one = strategy_pipeline(Ranked(strategy, 1.0), plans(link), BATCH)
    pipeline = Pipeline(2, one.pipeline.num_microbatches)
    request = PlanRequest(MESH, machines(link)).with_pipeline(pipeline, one.meshes)
    return search()(dataclasses.replace(request, ranks=()))[0]


def test_each_degree_has_a_plan_of_its_own():
    found = plans(FAR)
    assert set(found) == {PLAIN, SPREAD, SPLIT}
    assert laid(found[SPREAD].plan, "w_in") == laid(found[SPREAD].plan, "w_out") == {"R,S(0)"}
    assert laid(found[PLAIN].plan, "w_in") == {"open"}


def test_experts_over_copies_store_and_sum_less_and_exchange_tokens():
    table = model(FAR).table
    plain, spread = (table.cost_of(1, LayerLayout(2, 1, 2, experts)) for experts in (1, 2))
    assert {e.kind for e in spread.forward} == {e.kind for e in spread.backward} == {"all_to_all"}
    assert not plain.forward
    summed = sum(e.num_bytes for e in plain.sums) - sum(e.num_bytes for e in spread.sums)
    weights = 2 * 4 * 8 * 256 * 4
    assert summed == weights
    # Half of the weights, of their gradients and two slots.
    assert plain.fixed_bytes - spread.fixed_bytes == pytest.approx(4 * weights / 2, rel=0.01)


def test_nobody_shares_the_slots_of_experts_of_its_own():
    table = model(FAR).table

    def saved(experts: int) -> float:
        layout = LayerLayout(2, 1, 2, experts)
        before, after = (
            table.cost_of(1, layout),
            table.cost_of(1, layout._replace(shard_slots=True)),
        )
        return before.fixed_bytes - after.fixed_bytes

    slots = 2 * 2 * 4 * 8 * 256 * 4
    assert saved(1) - saved(2) == pytest.approx(slots / 2), "what two copies share of the experts'"
    assert 0 < saved(2) < saved(1) / 50


@pytest.mark.parametrize(("link", "experts"), [(NARROW, 2), (FAR, 1)])
def test_annealing_spreads_experts_where_that_pays(link, experts):
    best = ranked_strategies(model(link), "anneal")[0].strategy
    assert (best.actors, best.data, best.tensor, best.experts) == (2, 2, 1, experts)


@pytest.mark.slow
def test_a_search_plans_what_the_table_ranks_first_on_that_mesh():
    request = PlanRequest(MESH, machines(NARROW))
    asked = Pipeline(AUTO, search="anneal")
    plan = search_step(search(), request, dataclasses.replace(ALL, strategies=asked))[0]
    names = [name_of_plan(plan), *(rival.name for rival in plan.findings.rivals)]
    spread = [n for n in names if n.startswith("2 stages") and n.endswith("batch over model")]
    assert spread, names


def test_a_pipeline_runs_on_the_mesh_of_its_degrees_and_costs_what_its_layers_do():
    strategy = Strategy3D(2, 1, 2, (2, 1), experts=2)
    plan = planned(NARROW, strategy)
    assert plan.batch_axes == ("data", "model") and plan.mesh.shape == (1, 2)
    assert laid(plan, "w_in") == {"R,S(0)"}
    costs = [model(NARROW).table.cost_of(layer, strategy.layout(0)) for layer in range(3)]
    part, sizes, shares = machines(NARROW).part([0, 1]), costs[0].sizes, plan.stages.cost.stages
    name = machines(NARROW).device.name

    def of_all(*exchanges) -> float:
        return exchange_seconds(packed(exchanges), sizes, part)

    forward = sum(c.seconds[name].forward + exchange_seconds(c.forward, sizes, part) for c in costs)
    assert sum(s.forward_s for s in shares) == pytest.approx(forward, rel=0.02)
    summed = of_all(*(e for c in costs for e in c.sums))
    assert sum(s.reduction_s for s in shares) == pytest.approx(summed, rel=0.1)
