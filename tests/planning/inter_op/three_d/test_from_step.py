"""The table of a captured step: what its layers cost sums up to what stages are priced at."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest

from tests.clusters import device, two_levels
from tests.planning.problems import Captured
from tfpar.cluster import Link
from tfpar.pipeline import Pipeline
from tfpar.planning.inter_op.strategy_search import plans_of_layouts, sizes_of_stages
from tfpar.planning.inter_op.three_d.cost_model import simulate_strategy
from tfpar.planning.inter_op.three_d.cost_table import LayerLayout
from tfpar.planning.inter_op.three_d.from_step import step_table
from tfpar.planning.inter_op.three_d.memory import stored_bytes
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.space import ParallelDegrees, even
from tfpar.planning.inter_op.three_d.strategy import MemoryOptions
from tfpar.planning.inter_op.three_d.time_terms import exchange_seconds, packed
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.step_search import PlanRequest, StepSearch
from tfpar.plans import Plan
from tfpar.spec import Mesh, PlanError

SLOW = device(1e9, 1e9, 1e9, 1e11, 1e-6)
CLUSTER = two_levels("pairs", 2, 2, SLOW, Link(1e9, 1e-6), Link(1e8, 1e-6))
MESH = Mesh.of([2, 2])


@functools.cache
def search() -> StepSearch:
    captured = Captured.saved("residual_mlp")  # blocks, and what lies before and behind them
    return StepSearch(captured.step, captured.batch, find_planner("tap"), state_ratio=2.0)


@functools.cache
def model() -> StrategyProblem:
    request = PlanRequest(MESH, CLUSTER)
    plans = plans_of_layouts(search(), request, sizes_of_stages(request))
    table = step_table(plans, 8, dict.fromkeys(plans, 8), CLUSTER, shards=True)
    return StrategyProblem(table, CLUSTER, 8)


def planned(data: int, microbatches: int, recompute: bool = False) -> Plan:
    pipeline = Pipeline(2, microbatches, recompute=recompute)
    problem = model().table.kinds["layer 0"].prices.plans[data, 2 // data, 1].problem
    request = PlanRequest(
        MESH.sized(MESH.size // 2),
        CLUSTER,
        pipeline=pipeline,
        ranks=(),
        meshes=tuple(problem.meshes),
    )
    return search()(request)[0]


def test_blocks_that_repeat_are_one_kind_of_layers():
    table = model().table
    counts = [len(list(same)) for _, same in itertools.groupby(table.layers)]
    assert counts == [1, 1, 3, 1, 1]  # the middle one of five blocks that are alike is three


@pytest.mark.parametrize(("data", "recompute"), [(2, False), (1, False), (2, True)])
def test_layers_sum_up_to_the_stages_of_a_plan(data, recompute):
    plan = planned(data, 2, recompute)
    layout = LayerLayout(data, 2 // data, 4 // data, recompute=recompute)
    costs = [model().table.cost_of(layer, layout) for layer in range(len(model().table))]
    part, sizes, name = CLUSTER.part([0, 1]), costs[0].sizes, SLOW.name
    forward = sum(c.seconds[name].forward + exchange_seconds(c.forward, sizes, part) for c in costs)
    backward = sum(
        c.seconds[name].backward + exchange_seconds(c.backward, sizes, part) for c in costs
    )
    once = exchange_seconds(packed(e for c in costs for e in (*c.sums, *c.gathers)), sizes, part)
    update = sum(c.update_s[name] for c in costs)
    shares = plan.stages.cost.stages
    assert sum(s.forward_s for s in shares) == pytest.approx(forward, rel=0.02)
    total = backward + forward * recompute
    assert sum(s.backward_s for s in shares) == pytest.approx(total, rel=0.02)
    behind = sum(s.reduction_s + s.update_s for s in shares)
    assert behind == pytest.approx(once + update, rel=0.1)  # each stage starts its own sums
    assert sum(s.fixed_bytes for s in shares) == pytest.approx(
        sum(c.fixed_bytes for c in costs), rel=0.05
    )


@pytest.mark.parametrize(("data", "microbatches"), [(2, 1), (2, 4), (1, 4)])
def test_a_strategy_takes_and_stores_about_what_its_plan_does(data, microbatches):
    plan = planned(data, microbatches)
    degrees = ParallelDegrees(data, 2 // data, 8 // data // microbatches)
    strategy = even(model(), degrees)
    assert simulate_strategy(model(), strategy).seconds == pytest.approx(
        plan.cost.seconds, rel=0.05
    )
    # Which layer is where is for the planner of the stages to say.
    peaks = sum(share.peak_bytes for share in plan.stages.cost.stages)
    assert sum(stored_bytes(model(), strategy)) == pytest.approx(peaks, rel=0.15)


def test_copies_that_share_slots_out_store_less_and_exchange_as_much():
    table, plain = model().table, LayerLayout(2, 1, 2)
    before = table.cost("layer 1", plain)
    after = table.cost("layer 1", plain._replace(shard_slots=True))
    assert after.fixed_bytes < before.fixed_bytes
    assert {e.kind for e in before.sums} == {"all_reduce"}
    assert {e.kind for e in after.sums} == {"reduce_scatter"}
    assert sum(e.num_bytes for e in after.gathers) == sum(e.num_bytes for e in before.sums)


def test_slots_in_host_memory_are_not_on_the_device():
    table, plain = model().table, LayerLayout(2, 1, 2, shard_slots=True)
    before, after = (
        table.cost("layer 1", plain._replace(offload_slots=away)) for away in (False, True)
    )
    assert after.host_bytes > 0 == before.host_bytes
    assert after.fixed_bytes == pytest.approx(before.fixed_bytes - after.host_bytes)


def test_a_layout_without_a_plan_has_no_cost():
    kind = model().table.kinds["layer 0"]
    assert not kind.has(SLOW.name, LayerLayout(3, 1, 1))
    assert not kind.has(SLOW.name, LayerLayout(2, 1, 3))  # does not divide the batch
    with pytest.raises(PlanError, match="no plan"):
        kind.cost(LayerLayout(3, 1, 1))


def test_slots_are_shared_where_nothing_else_fits():
    """What a search of strategies does to store less holds for steps too."""
    strategy = even(model(), ParallelDegrees(2, 1, 1))
    most = max(stored_bytes(model(), strategy))
    less = dataclasses.replace(strategy, memory=MemoryOptions(recompute=True, shard_slots=True))
    assert max(stored_bytes(model(), less)) < most
