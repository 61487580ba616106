"""TAP's planner on meshes of four axes: data, experts and two that split weights."""

from __future__ import annotations

import pytest

from tests.planning.problems import Captured
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.folding.folded_plan import unfold_plan
from tfpar.planning.intra_op import TapPlanner
from tfpar.planning.intra_op.tap.mesh_search import MeshSearch
from tfpar.planning.meshes import expert_meshes
from tfpar.planning.pricing.plan_propagation import propagate_plan
from tfpar.spec import Shard


def test_experts_are_split_one_by_one_and_within_along_two_axes():
    problem = Captured.saved("gshard_moe").problem([16], "rhino-m8")
    model = FoldedModel.of(problem, 2)
    logical = next(
        one
        for one in expert_meshes(problem.meshes[0].mesh, experts=2)
        if one.mesh.shape == (2, 2, 2, 2)
    )
    search = MeshSearch(problem, model, logical)
    search.glance(())
    search.explore([search.whole], lambda unit: [tuple(len(g.options) - 1 for g in unit)])
    found = search.found()
    assert found is not None
    plan = unfold_plan(problem, model, found, "tap")
    specs = propagate_plan(plan, problem).variable_specs
    experts = [spec for v, spec in specs.items() if v.name.endswith(("/wi", "/wo"))]
    assert experts and all(spec[1] == Shard(0) for spec in experts), "one by one"
    split = [spec[2:] for spec in specs.values()]
    assert any(all(isinstance(p, Shard) for p in spec) for spec in split), "along both axes"


@pytest.mark.slow
def test_such_meshes_are_among_those_that_are_searched():
    problem = Captured.saved("moe_4_experts").problem([8], "rhino-m8")
    plan = TapPlanner().solve(problem)
    assert any("experts=2 x d1=2 x d2=2" in other.name for other in plan.findings.layouts)
