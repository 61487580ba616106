"""Incremental pricing is the one evaluator on the one propagation, folded or not."""

import dataclasses
import random

import pytest

from tests.cases import amounts, at_night
from tests.planning.problems import Captured
from tfpar.cost import evaluate
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.tap.mesh_search import MeshSearch
from tfpar.planning.memory.offload import offloaded_problem, select_offloads
from tfpar.planning.memory.recompute import Blocks, recomputed_problem
from tfpar.plans import Offload
from tfpar.propagation import propagate

CASES = [
    "moe_4_layers, compiled",
    "gpt_mixed, recomputed, offloaded",
    "resnet",
    *at_night(
        "gpt_5_layers, compiled",
        "t5_4_layers",
        "t5_4_layers, compiled, recomputed, offloaded",
    ),
]


@pytest.fixture(scope="module", params=CASES)
def problem(request):
    name, *ways = request.param.split(", ")
    problem = Captured.saved(name).problem([2, 2], "v100-ethernet")
    problem = problem.with_step(jit_compile="compiled" in ways)
    if "recomputed" in ways:
        problem = recomputed_problem(problem, Blocks.of(problem.step.graph).recomputed(True))
    if "offloaded" in ways:
        names = select_offloads(Offload(True, True), problem.step.graph, state_ratio=2.0)
        problem = offloaded_problem(problem, names)
    return problem


@pytest.mark.slow
@pytest.mark.parametrize("draws", amounts(1, 3))
def test_random_plans_cost_the_same_folded_and_whole_step_by_step_and_at_once(problem, draws):
    rng = random.Random(0)
    folded, whole = FoldedModel.of(problem, 2), FoldedModel.of(problem, 10**6)
    assert len(folded.prepared.graph.ops) <= len(whole.prepared.graph.ops)
    twins = {v.name: [t.name for t in ts] for v, ts in folded.folded.twins.items()}
    for logical in problem.meshes[1:]:
        few, many = (MeshSearch(problem, model, logical) for model in (folded, whole))
        for _ in range(draws):
            specs = {}
            for group in few.groups:
                spec = rng.choice(group.options)
                for variable in group.variables:
                    few.plans.lay(variable, spec)
                    specs |= dict.fromkeys(twins[variable.name], spec)
            for group in many.groups:
                for variable in group.variables:
                    many.plans.lay(variable, specs[variable.name])
            costs = []
            for search, model in ((few, folded), (many, whole)):
                assert not search.plans.settle()
                costs.append(search.plans.cost())
                known = {v.name for v in model.prepared.graph.variables}
                anchors = dataclasses.replace(
                    search.plans.anchors,
                    variables={n: s for n, s in specs.items() if n in known},
                )
                partitioned = propagate(model.prepared, logical.mesh, anchors)
                costs.append(evaluate(partitioned, problem.cluster, model.roles, 2.0))
            for cost in costs[1:]:
                assert cost.seconds == pytest.approx(costs[0].seconds, rel=1e-9)
                for part in ("weight_bytes", "state_bytes", "gradient_bytes", "activation_bytes"):
                    expected = getattr(costs[0], part)
                    assert getattr(cost, part) == pytest.approx(expected, rel=1e-9), part


@pytest.mark.slow
def test_a_plan_laid_again_costs_what_it_did(problem):
    search = MeshSearch(problem, FoldedModel.of(problem, 2), problem.meshes[-1])
    search.plans.settle()
    first = search.plans.cost()
    for group in search.groups:
        for pick in (*range(len(group.options)), 0):
            search.lay(group, pick)
            search.plans.settle()
    assert search.plans.cost().seconds == pytest.approx(first.seconds, rel=1e-9)
