"""The views of a plan: a summary, one weight or layer, a graph; with the graph and without."""

import pytest

from tests.planning.problems import Captured, partition
from tfpar.observability.report.views import explain, plan_graph, summary
from tfpar.planning.intra_op import TapPlanner
from tfpar.plans import Plan
from tfpar.spec import PlanError


@pytest.fixture(scope="module")
def problem():
    return Captured.saved("mlp").problem([2, 2], "cpu")


@pytest.fixture(scope="module")
def plan(problem) -> Plan:
    return TapPlanner().solve(problem)


def test_the_views_are_those_that_a_plan_has_methods_for(plan):
    assert plan.summary() == summary(plan)
    assert plan.explain("head/kernel") == explain(plan, "head/kernel")


def test_a_summary_has_every_weight(plan):
    text = summary(plan)
    assert "Found by the tap planner" in text
    for name in ("stem/kernel", "narrow/kernel", "head/kernel"):
        assert name in text, name


def test_a_laid_out_graph_says_more(plan, problem):
    laid = partition(problem, plan)
    assert len(summary(plan, laid)) > len(summary(plan))


def test_a_weight_is_explained_with_what_else_it_could_be(plan):
    assert plan.variables["head/kernel"].alternatives
    assert "otherwise, at best:" in explain(plan, "head/kernel")


def test_a_graph_is_drawn_of_what_is_laid_out(plan, problem):
    graph = plan_graph(plan, partition(problem, plan))
    weights = {name for _, node in graph.nodes(data=True) for name in node["weights"]}
    assert {"stem/kernel", "narrow/kernel", "head/kernel"} <= weights
    with pytest.raises(PlanError, match="holds no graph"):
        plan_graph(plan, None)


def test_what_is_in_no_plan_is_refused(plan):
    with pytest.raises(PlanError, match="no variable 'nothing'"):
        explain(plan, "nothing")


def test_views_survive_a_file(plan):
    again = Plan.from_json(plan.to_json())
    assert sorted(summary(again).splitlines()) == sorted(summary(plan).splitlines())
    assert explain(again, "head/kernel") == explain(plan, "head/kernel")
