"""Optimizer slots that are split further than their weights, where a plan does not fit else."""

from __future__ import annotations

import dataclasses

import pytest

import tfpar as tap
from tests.planning.changes import changed
from tests.planning.tiny import chain
from tests.planning.tiny import problem as tiny_problem
from tfpar.cluster import Cluster, Device, Level
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.memory.limit import solve_under_memory_limit
from tfpar.planning.memory.plan_transforms import apply_plan_transforms
from tfpar.planning.memory.relayout import fastest_plan
from tfpar.planning.memory.shard_slots import (
    saved_by_sharded_slots,
    shard_slots,
    with_sharded_slots,
)
from tfpar.planning.meshes import given_mesh
from tfpar.planning.pricing.plan_propagation import propagate_plan
from tfpar.planning.pricing.price import price_whole
from tfpar.plans import Plan
from tfpar.propagation import prepare
from tfpar.spec import Mesh, Replicate, Shard

MACHINES = Cluster.regular(
    "machines", Device({"float32": 1e11}, 1e10, 1e12, 1e-6), [Level(4, 1e10, 1e-6)], overlap=0.9
)
"""Four ranks for which splitting a large batch is the fastest."""

WHOLE, FIRST = (Replicate(), Replicate()), (Shard(0), Replicate())


def problem_of(*widths, state_ratio=2.0):
    """Data parallelism, with stand-ins for the updates."""
    graph = chain(512, *(widths or (64, 64, 64, 6)))
    found = tiny_problem(graph, [4])
    return (
        found.with_meshes([given_mesh(Mesh(("data", "model"), (4, 1)), ("data",))])
        .with_cluster(MACHINES)
        .with_step(state_ratio=state_ratio, zero_cost_ops=frozenset(graph.effects))
    )


@pytest.fixture(scope="module")
def problem():
    return problem_of()


@pytest.fixture(scope="module")
def fastest(problem):
    plan = fastest_plan(problem, TapPlanner())
    assert weights_of(plan) == {WHOLE}
    return plan


def weights_of(plan):
    """How they lie."""
    return {v.spec for v in plan.variables.values() if v.trainable}


def slots_of(plan):
    return {name: v.slots for name, v in plan.variables.items() if v.slots is not None}


def test_slots_of_matrices_go_along_the_first_dim_that_is_even(problem, fastest):
    found = slots_of(shard_slots(fastest, problem))
    assert set(found.values()) == {FIRST}
    assert [*found] == [f"layer_{i}/kernel" for i in (1, 2, 3)]


def test_what_is_saved_is_what_it_costs_less(problem, fastest):
    split = with_sharded_slots(fastest, problem)
    before, _ = price_whole(fastest, problem)
    saved = before.state_bytes - split.cost.state_bytes
    assert saved == pytest.approx(saved_by_sharded_slots(fastest, problem))
    kernels = 4 * (64 * 64 + 64 * 64 + 64 * 6)
    assert saved == pytest.approx(2 * kernels * 3 / 4), "of two slots, a quarter of each is left"
    assert split.cost.weight_bytes == before.weight_bytes
    assert split.cost.memory_bytes < before.memory_bytes


def test_gradients_are_scattered_and_new_weights_gathered(problem, fastest):
    laid = propagate_plan(shard_slots(fastest, problem), problem)
    kinds = [moved.kind for moved in laid.communications()]
    assert kinds.count("reduce_scatter") == kinds.count("all_gather") == 3
    assert kinds.count("all_reduce") == 1  # of the loss
    weights = {v.name: spec for v, spec in laid.variable_specs.items() if v.trainable}
    assert set(weights.values()) == {WHOLE}


def test_the_problem_of_a_plan_without_split_slots_stays_as_it_is(problem, fastest):
    assert apply_plan_transforms(problem, fastest) is problem
    apart = apply_plan_transforms(problem, shard_slots(fastest, problem))
    assert (
        not prepare(problem.step.graph).slots_apart
        and len(prepare(apart.step.graph).slots_apart) == 3
    )
    assert (
        apply_plan_transforms(problem, shard_slots(fastest, problem)).step.graph is apart.step.graph
    )


def test_without_slots_nothing_is_split():
    problem = problem_of(state_ratio=0.0)
    plan = fastest_plan(problem, TapPlanner())
    assert shard_slots(plan, problem) is None and with_sharded_slots(plan, problem) is None
    assert saved_by_sharded_slots(plan, problem) == 0


def test_what_ranks_have_in_one_memory_is_there_once(problem, fastest):
    one = dataclasses.replace(MACHINES, one_memory=True)
    together = changed(problem, cluster=one)
    assert shard_slots(fastest, together) is None and not saved_by_sharded_slots(fastest, together)


def test_what_divides_unevenly_stays_whole():
    problem = problem_of(64, 64, 6)
    plan = fastest_plan(problem, TapPlanner())
    odd = {
        name: dataclasses.replace(v, shape=(65, 63)) if v.shape == (64, 64) else v
        for name, v in plan.variables.items()
    }
    found = slots_of(shard_slots(dataclasses.replace(plan, variables=odd), problem))
    assert [*found] == ["layer_2/kernel"]


def test_slots_are_split_before_anything_else_where_that_makes_a_plan_fit(problem, fastest):
    cost = fastest.cost
    limit = cost.memory_bytes - saved_by_sharded_slots(fastest, problem) / 2
    within = problem.with_objective(memory_limit=limit)
    assert problem.with_objective(memory_limit=limit).excess_in_parts(cost)
    found = solve_under_memory_limit(within, TapPlanner())
    assert slots_of(found) and not found.recompute and weights_of(found) == {WHOLE}
    assert not within.excess(found.cost)
    assert solve_under_memory_limit(problem, TapPlanner()) == fastest


def test_plan_files_and_differences_have_them(problem, fastest):
    split = shard_slots(fastest, problem)
    read = Plan.from_json(split.to_json())
    assert slots_of(read) == slots_of(split)
    assert not fastest.diff(Plan.from_json(fastest.to_json()))
    assert sum("slots of" in line for line in fastest.diff(split)) == 3
    assert "those of 3 weights" in split.summary()
    with pytest.raises(tap.TfparError, match="slots of"):
        name = next(iter(slots_of(split)))
        wrong = dataclasses.replace(split.variables[name], slots=(Shard(5), Replicate()))
        dataclasses.replace(split, variables={**split.variables, name: wrong})
