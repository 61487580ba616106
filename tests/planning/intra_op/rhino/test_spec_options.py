"""What else the weights of Rhino's plans could be: priced as the evaluator prices it."""

import dataclasses
import math

import pytest

from tests.planning.problems import Captured
from tfpar.cost import evaluate
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.intra_op.rhino.planner import price_spec_options
from tfpar.propagation import Anchors, propagate
from tfpar.spec import Mesh, Replicate, Shard, SpecError, replicated_spec


def whole(model, mesh):
    """Anchors of a plan that splits nothing."""
    graph, spec = model.prepared.graph, replicated_spec(mesh.num_axes)
    return Anchors(
        variables={v.name: spec for v in graph.variables},
        inputs=[spec] * len(graph.inputs),
        outputs=[spec] * len(graph.outputs),
    )


def priced(problem, model, mesh, anchors):
    return evaluate(
        propagate(model.prepared, mesh, anchors),
        problem.cluster,
        model.roles,
        problem.step.state_ratio,
    )


def test_what_else_a_weight_could_be_is_priced_as_a_whole():
    problem = Captured.saved("wide").problem([1, 4], "v100-ethernet")
    model, mesh = FoldedModel.of(problem, 2), Mesh(("data", "model"), (2, 2))
    anchors = whole(model, mesh)
    cost = priced(problem, model, mesh, anchors)
    found = price_spec_options(problem, model, mesh, anchors, cost, Deadline())
    assert any(found.values())
    for options in found.values():
        together = [name for name, others in found.items() if others is options]
        for option in options:
            variables = {**anchors.variables, **dict.fromkeys(together, option.spec)}
            changed = dataclasses.replace(anchors, variables=variables)
            assert option.seconds == pytest.approx(priced(problem, model, mesh, changed).seconds)


def test_a_split_that_does_not_go_with_a_strided_one_is_no_way():
    problem = Captured.saved("dense").problem([1, 4], "v100-ethernet")
    model, mesh = FoldedModel.of(problem, 2), Mesh(("data", "model"), (2, 2))
    anchors, strided = whole(model, mesh), (Replicate(), Shard(0, 4))
    anchors.variables["dense/kernel"] = strided
    cost = priced(problem, model, mesh, anchors)
    found = price_spec_options(problem, model, mesh, anchors, cost, Deadline())
    seconds = {option.spec: option.seconds for option in found["dense/kernel"]}
    refused = (Shard(0), Shard(0, 4))  # halves of 6 rows are no rows of 4
    with pytest.raises(SpecError, match="does not fit"):
        priced(
            problem,
            model,
            mesh,
            dataclasses.replace(anchors, variables={**anchors.variables, "dense/kernel": refused}),
        )
    assert seconds[refused] == math.inf
    assert seconds[Shard(1), strided[1]] < math.inf
    bias = {option.spec: option.seconds for option in found["dense/bias"]}
    assert bias[Shard(0), Replicate()] < math.inf


def test_plans_have_nothing_cheaper_beside_them():
    problem = Captured.saved("wide").problem([1, 2], "rhino-m8")
    plan = RhinoPlanner().solve(problem)
    options = [option for v in plan.variables.values() for option in v.alternatives]
    assert options
    assert min(option.seconds for option in options) >= plan.cost.seconds * (1 - 1e-9)
