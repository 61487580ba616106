"""Plans, prices and collectives of saved steps: planning from end to end, without TensorFlow."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from tests.graphs import BATCH, NAMES, saved, saved_text
from tests.ir.text.same import assert_same_step
from tfpar.cluster import Cluster, Device, Level
from tfpar.compile import simplify_step
from tfpar.compile.local import COLLECTIVE_TYPES, build_local_program
from tfpar.cost import evaluate
from tfpar.ir import Roles, fingerprint, format_step, parse_step
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.pricing.plan_propagation import propagate_plan
from tfpar.planning.problem import Problem
from tfpar.planning.problems import state_problem
from tfpar.planning.request import PlanRequest
from tfpar.planning.solve import find_plan
from tfpar.plans import Plan
from tfpar.spec import Mesh

SLOW = Cluster.regular(
    "slow",  # so slow that small models are worth splitting
    Device({"float32": 1e9}, 2**30, 1e9, 1e-7),
    [Level(2, 1e9, 1e-6), Level(2, 4e9, 1e-7)],
)
PLANNED = [
    ("wide", "tap"),
    ("wide", "rhino"),
    pytest.param("gshard_moe", "tap", marks=pytest.mark.slow),
    *(
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in (("gpt", "tap"), ("gpt", "rhino"), ("resnet", "tap"), ("t5", "tap"))
    ),
]


@functools.cache
def planned(name: str, planner: str) -> tuple[Problem, Plan]:
    request = PlanRequest(Mesh.of([2, 2]), SLOW)
    problem = state_problem(saved(name), request, BATCH, state_ratio=2.0)
    return problem, find_plan(problem, find_planner(planner))


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_step_reads_back(name):
    step = saved(name)
    again = parse_step(format_step(step))
    assert_same_step(again, step)
    assert fingerprint(again.graph) == fingerprint(step.graph)
    _, text = saved_text(name).split("\n", 1)
    assert format_step(step) == text


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_step_is_simple_already(name):
    step, again = saved(name), saved(name)
    assert step.gradients
    simplify_step(again)
    assert_same_step(again, step)


@pytest.mark.slow
@pytest.mark.parametrize("name, planner", PLANNED)
def test_a_plan_costs_what_its_whole_graph_does(name, planner):
    problem, plan = planned(name, planner)
    laid = propagate_plan(plan, problem)
    roles = Roles.of(laid.graph, times=dict.fromkeys(problem.step.zero_cost_ops, 0))
    cost = evaluate(laid, problem.cluster, roles, problem.step.state_ratio)
    assert plan.cost is not None
    if plan.chunks == 1:
        assert plan.cost.seconds == pytest.approx(cost.seconds, rel=1e-4)
    # A folded block that stands for several comes within some percent (`cost.memory.peak`).
    assert plan.cost.memory_bytes == pytest.approx(cost.memory_bytes, rel=0.05)


@pytest.mark.parametrize("name, planner", PLANNED)
def test_what_is_predicted_is_what_the_program_holds(name, planner):
    problem, plan = planned(name, planner)
    laid = propagate_plan(plan, problem)
    predicted = Counter((kind, axes) for kind, axes, _ in laid.collectives())
    program = build_local_program(laid)
    emitted = Counter(
        (COLLECTIVE_KINDS[op.type], tuple(plan.mesh.axis_names[a] for a in op.attrs["axes"]))
        for op in program.graph.ops
        if op.type in COLLECTIVE_TYPES
    )
    assert predicted == emitted and predicted


COLLECTIVE_KINDS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllToAll": "all_to_all",
    "Broadcast": "broadcast",
}


@pytest.mark.parametrize("name, planner", PLANNED)
def test_a_plan_survives_a_file(name, planner):
    problem, plan = planned(name, planner)
    assert plan.mesh.size == 4 and plan.fingerprint == problem.step.fingerprint
    read = Plan.from_json(plan.to_json())
    assert read.to_json() == plan.to_json()
    assert str(propagate_plan(read, problem)) == str(propagate_plan(plan, problem))


def test_deciding_every_op_is_no_slower_than_deciding_weights():
    (_, by_weights), (_, by_ops) = planned("wide", "tap"), planned("wide", "rhino")
    assert by_weights.cost is not None and by_ops.cost is not None
    assert by_ops.cost.seconds <= 1.1 * by_weights.cost.seconds
