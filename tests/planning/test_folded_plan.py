"""What a search finds for the folded graph becomes the plan of the whole model."""

from __future__ import annotations

import dataclasses

import pytest

from tests.ir.blocks import chain
from tests.planning.changes import changed
from tests.planning.problems import Captured
from tests.planning.tiny import problem
from tfpar.cost import Cost
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.folding.folded_plan import FoldedPlan, count_split, unfold_plan
from tfpar.planning.intra_op.tap.mesh_search import MeshSearch
from tfpar.planning.problem import ConstrainedSpec
from tfpar.plans import Candidate, SpecOption
from tfpar.propagation import Anchors, OpPlan
from tfpar.spec import Mesh, parse_spec

MESH = Mesh.of({"data": 1, "model": 2})
COLUMNS, ROWS, WHOLE = map(parse_spec, ("R,S(1)", "R,S(0)", "R,R"))


def cost(seconds: float, collectives: int = 0) -> Cost:
    times = (seconds, 0.0, 0.0)
    return Cost(seconds, times, (0.0,) * 3, 0.0, 0.0, 1.0, 0.0, collectives=collectives)


@pytest.fixture(scope="module")
def asked():
    return problem(chain([f"m/block_{i}" for i in range(6)]), [2])


@pytest.fixture(scope="module")
def model(asked):
    return FoldedModel.of(asked, 2)


def kernel(i: int) -> str:
    return f"m/block_{i}/kernel"


def of_block(i: int, spec, **ops) -> FoldedPlan:
    anchors = Anchors(variables={kernel(i): spec}, ops=ops)
    return FoldedPlan(MESH, ("data",), anchors, cost(1.0), 1)


def repeated(model) -> str:
    """The kernel of the block that stands for several."""
    twins = model.folded.twins.items()
    return next(v.name for v, ts in twins if len(ts) > 1 and v.name.endswith("kernel"))


def test_what_is_found_for_a_block_serves_all_its_instances(asked, model):
    name = repeated(model)
    found = FoldedPlan(MESH, (), Anchors(variables={name: COLUMNS}), cost(1.0), 1)
    plan = unfold_plan(asked, model, found, "stub")
    split = {n for n, v in plan.variables.items() if v.spec == COLUMNS}
    twins = next(ts for v, ts in model.folded.twins.items() if v.name == name)
    assert split == {t.name for t in twins} and len(split) > 1
    assert all("chosen by the stub planner" in plan.variables[n].why for n in split)


def test_what_is_not_named_is_left_to_propagation(asked, model):
    plan = unfold_plan(asked, model, of_block(0, COLUMNS), "stub")
    assert plan.variables[kernel(0)].spec == COLUMNS
    assert plan.variables["m/block_0/bias"].spec is None
    assert set(plan.variables) == {v.name for v in asked.step.variables}


def test_what_is_given_has_the_say(asked, model):
    given = changed(asked, fixed={kernel(0): ConstrainedSpec(ROWS, "the user")})
    plan = unfold_plan(given, model, of_block(0, COLUMNS), "stub")
    assert (plan.variables[kernel(0)].spec, plan.variables[kernel(0)].why) == (ROWS, "the user")


def test_how_an_op_runs_is_said_of_all_that_it_stands_for(asked, model):
    stand_in, names = next((s, ns) for s, ns in model.folded.stands_for.items() if len(ns) > 1)
    run = OpPlan((WHOLE,), (WHOLE,), (WHOLE,))
    found = FoldedPlan(MESH, (), Anchors(ops={stand_in: run}), cost(1.0), 0)
    plan = unfold_plan(asked, model, found, "stub")
    assert plan.ops == dict.fromkeys(names, run)


def test_alternatives_are_those_of_all_instances(asked, model):
    name, other = repeated(model), SpecOption(ROWS, 2.0)
    plan = unfold_plan(asked, model, of_block(0, COLUMNS), "stub", {name: [other]})
    twins = next(ts for v, ts in model.folded.twins.items() if v.name == name)
    assert {n for n, v in plan.variables.items() if v.alternatives} == {t.name for t in twins}


def test_a_plan_names_mesh_batch_cost_and_who_found_it(asked, model):
    found = of_block(0, COLUMNS)
    elsewhere = [Candidate("slow", 3.0), Candidate("quick", 2.0, 1e9)]
    plan = unfold_plan(asked, model, found, "stub", elsewhere=elsewhere, cut_short=True)
    assert (plan.mesh, plan.batch_axes, plan.planner) == (MESH, ("data",), "stub")
    assert plan.cost == found.cost and plan.findings.cut_short
    assert [other.name for other in plan.findings.layouts] == ["quick", "slow"], "the fastest first"


def test_a_plan_says_what_it_was_preferred_to_if_that_is_another(asked, model):
    found, faster = of_block(0, COLUMNS), of_block(0, ROWS)
    faster = dataclasses.replace(faster, cost=cost(0.9, collectives=7))
    preferred = unfold_plan(asked, model, found, "stub", preferred_to=faster)
    assert preferred.findings.passed_over == (0.9, 7)
    assert unfold_plan(asked, model, found, "stub", preferred_to=found).findings.passed_over is None
    assert unfold_plan(asked, model, found, "stub").findings.passed_over is None


def test_weights_that_are_split_are_counted_but_for_those_that_are_given():
    specs = {"a": COLUMNS, "b": WHOLE, "c": ROWS}
    assert count_split(specs, ()) == 2
    assert count_split(specs, {"a"}) == 1


@pytest.mark.slow
def test_folded_models_store_about_what_whole_ones_do():
    asked = Captured.saved("gpt_narrow").problem([2, 2], "cpu")
    peaks = []
    for min_duplicate in (2, 100):
        parts = FoldedModel.of(asked, min_duplicate)
        search = MeshSearch(asked, parts, asked.meshes[0])
        peaks.append(search._cost_and_live().live_bytes)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)
