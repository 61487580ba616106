"""Weights that ranks store in parts, where a plan does not fit otherwise or constraints say so."""

from __future__ import annotations

import dataclasses

import pytest

import tfpar as tap
from tests.planning.changes import changed
from tests.planning.problems import Captured
from tests.planning.test_offload import KERNELS, linked
from tests.planning.test_slots import MACHINES, problem_of, weights_of
from tfpar.cost import collective_seconds
from tfpar.planning.cache import problem_digest
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.memory.fit import MemoryFit
from tfpar.planning.memory.limit import solve_under_memory_limit
from tfpar.planning.memory.plan_transforms import apply_plan_transforms
from tfpar.planning.memory.relayout import fastest_plan
from tfpar.planning.memory.shard_slots import with_sharded_slots
from tfpar.planning.memory.shard_weights import ShardWeights, with_sharded_weights
from tfpar.planning.pricing.price import price_plan, price_whole
from tfpar.planning.problem import ConstrainedSpec
from tfpar.plans import Offload, OffloadPlan
from tfpar.spec import Replicate, Shard


@pytest.fixture(scope="module")
def problem():
    return problem_of()


@pytest.fixture(scope="module")
def fastest(problem):
    return fastest_plan(problem, TapPlanner())


def test_each_rank_stores_a_part_and_gathers_it_twice(problem, fastest):
    sharded = with_sharded_weights(fastest, problem)
    cost, before = sharded.cost, fastest.cost
    assert weights_of(sharded) == {(Shard(0), Replicate())}
    for what in ("weight_bytes", "gradient_bytes", "state_bytes"):
        assert getattr(cost, what) == pytest.approx(getattr(before, what) / 4)
    assert cost.memory_bytes < with_sharded_slots(fastest, problem).cost.memory_bytes
    again, laid = price_whole(sharded, problem)
    assert again == cost
    kinds = [kind for kind, _, _ in laid.collectives()]
    # The first layer's weight is not read by the backward pass; that of the last is kept for it.
    assert kinds.count("all_gather") == 3 + 1 and kinds.count("reduce_scatter") == 3


def test_a_limit_that_sharded_slots_do_not_keep_is_kept_by_sharded_weights(problem, fastest):
    limit = with_sharded_weights(fastest, problem).cost.memory_bytes * 1.001
    within = problem.with_objective(memory_limit=limit)
    assert with_sharded_slots(fastest, problem).cost.memory_bytes > limit
    plan = solve_under_memory_limit(within, TapPlanner())
    assert plan.cost.memory_bytes <= limit
    assert "shard weights" in {tried.name for tried in plan.findings.attempts}


def test_the_estimate_is_of_the_gathers(problem, fastest):
    move = ShardWeights(problem, TapPlanner(), OffloadPlan(), [()])
    fit = MemoryFit(lambda plan: 1.0)
    fit.tried.append(fastest)
    (plan,) = (p for p in move.plans(fit) if not p.offloaded)
    stored = ("weight_bytes", "gradient_bytes", "state_bytes")
    saved = sum(getattr(fastest.cost, n) - getattr(plan.cost, n) for n in stored)
    gathers = (collective_seconds("all_gather", (0,), n, plan.mesh, MACHINES) for n in KERNELS)
    assert move.estimate(fit).seconds_per_byte == pytest.approx(2 * sum(gathers) / saved)


def test_what_is_offloaded_besides_is_priced_once(problem):
    asked = changed(linked(problem, 1e15), offload=Offload(optimizer=["layer_1/kernel"]))
    move = ShardWeights(asked, TapPlanner(), OffloadPlan(("layer_1/kernel",)), [()])
    (plan,) = move.plans(MemoryFit(lambda plan: 1.0))
    assert plan.offloaded.slots == ("layer_1/kernel",)
    assert plan.cost == price_whole(plan, asked)[0]
    kept = with_sharded_weights(fastest_plan(problem, TapPlanner()), problem)
    assert plan.cost.state_bytes == pytest.approx(kept.cost.state_bytes - 2 * KERNELS[0] / 4)


def test_the_step_that_gathers_is_made_once(problem, fastest):
    plan = with_sharded_weights(fastest, problem)
    made = apply_plan_transforms(problem, plan)
    again = apply_plan_transforms(problem, plan)
    assert made.memo is again.memo and made.step.graph is again.step.graph
    assert apply_plan_transforms(made, plan).step.graph is made.step.graph, "gathered already"


def test_what_the_user_has_said_of_stays(problem, fastest):
    given = {name: v.spec for name, v in fastest.variables.items() if "layer_1" in name}
    asked = changed(problem, fixed={n: ConstrainedSpec(spec, "so") for n, spec in given.items()})
    plan = with_sharded_weights(fastest, asked)
    assert {n for n, v in plan.variables.items() if v.gathered} == {
        "layer_2/kernel",
        "layer_3/kernel",
    }
    together = changed(problem, cluster=dataclasses.replace(problem.cluster, one_memory=True))
    assert with_sharded_weights(fastest, together) is None, "in one memory nothing is saved"


@pytest.fixture(scope="module")
def gpt():
    return Captured.saved("gpt")


def planned(gpt, ranks, *constraints, planner=None):
    """The problem under these constraints, and the plan."""
    problem = gpt.problem({"data": ranks}, "dgx-a100", constraints)
    return problem, fastest_plan(problem, planner or TapPlanner())


def test_planners_price_gathers_that_constraints_ask_for(gpt):
    problem, plan = planned(gpt, 4, tap.fsdp("data"))
    _, whole = planned(gpt, 4, tap.batch("data"), tap.replicate(".*"))
    weights = [v for v in plan.variables.values() if v.trainable]
    assert all(v.gathered is not None and v.why == "fsdp('data')" for v in weights)
    assert plan.cost.weight_bytes == pytest.approx(whole.cost.weight_bytes / 4, rel=0.05)
    cost, _ = price_whole(plan, problem)
    assert cost.seconds == pytest.approx(plan.cost.seconds, rel=1e-3)
    assert not plan.tensors, "what is gathered is said of weights"


def test_each_stage_is_another_problem_for_the_cache(gpt):
    asked = (
        [tap.batch("data"), tap.replicate(".*")],
        *([tap.fsdp("data", stage=n)] for n in (1, 2, 3)),
        [tap.fsdp("data", keep=True)],
    )
    problems = [gpt.problem({"data": 2}, "dgx-a100", constraints) for constraints in asked]
    assert len({problem_digest(problem, TapPlanner()) for problem in problems}) == len(asked)


def test_optimizer_slots_that_constraints_shard_are_priced(gpt):
    _, one = planned(gpt, 4, tap.fsdp("data", stage=1))
    _, whole = planned(gpt, 4, tap.batch("data"), tap.replicate(".*"))
    assert one.cost.state_bytes == pytest.approx(whole.cost.state_bytes / 4, rel=0.05)
    assert one.cost.weight_bytes == whole.cost.weight_bytes


def test_sums_of_microbatches_are_stored_in_parts(gpt):
    costs = []
    for stage in (1, 2, 3):
        problem, plan = planned(gpt, 2, tap.fsdp("data", stage=stage))
        plan = dataclasses.replace(plan, microbatches=2)
        costs.append(price_plan(plan, problem, problem.cluster).cost)
    one, two, three = costs
    dense = 0.9  # the sums of sparse gradients of the embedding stay whole
    assert two.gradient_bytes < one.gradient_bytes * (0.5 + 0.5 * (1 - dense) + 0.1)
    assert two.gradients_s > 1.5 * one.gradients_s, "each microbatch's are scattered"
    assert three.weight_bytes == pytest.approx(two.weight_bytes / 2, rel=0.05)
    once = planned(gpt, 2, tap.fsdp("data"))[1].cost
    assert sum(three.communication_s) > 1.2 * sum(once.communication_s), "and each gathers"
