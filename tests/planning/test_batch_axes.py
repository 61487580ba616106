"""Which axes split the batch is read off the ops; what comes of it is the same program."""

from __future__ import annotations

import pytest

import tfpar as tap
from tests.clusters import slow_cores
from tests.planning.by_ops import ByOps
from tests.planning.problems import Captured, partition
from tfpar.planning.intra_op.batch_axes import infer_batch_axes, is_taken_in_rows
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.solve import find_plan
from tfpar.spec import Shard, replicated_spec


def problem_of(name, mesh=(2,), constraints=()):
    return Captured.saved(name).problem(mesh, slow_cores(mesh[0]), constraints)


def test_what_every_op_takes_in_rows_is_split():
    problem = problem_of("perceptron")
    unsaid = ByOps().solve(problem)
    assert unsaid.ops and not unsaid.batch_axes
    whole = partition(problem, unsaid)
    plan = infer_batch_axes(unsaid, problem)
    parts = partition(problem, plan)
    assert plan.batch_axes == ("data",)
    assert all(parts.specs[t] == (Shard(0),) for t in problem.step.batched)
    assert all(whole.specs[t] != (Shard(0),) for t in problem.step.batched)
    assert parts.collectives() == whole.collectives()
    assert {"S(0) over data"} == set(_column(plan.summary(whole, full=True), "Its ops take"))
    assert {"S(0) over data"} == set(_column(plan.summary(parts, full=True), "A rank is given"))
    assert "batch split over data" in plan.summary(parts, full=True)


def _column(summary: str, name: str) -> list[str]:
    """What the table of inputs says under `name`."""
    lines = iter(summary[summary.index("Inputs of the step") :].splitlines()[2:])
    at = [cell.strip() for cell in next(lines).split("|")].index(name)
    rows = []
    for line in lines:
        if not line.startswith(("|", "+")):
            break
        if line.startswith("|"):
            rows.append(line.split("|")[at].strip())
    return rows


def test_ops_that_hand_the_batch_on_are_looked_through():
    problem = problem_of("perceptron_with_a_cast")
    plan = ByOps(whole=frozenset({"Cast"})).solve(problem)
    (cast,) = (
        op
        for op in problem.step.graph.ops
        if op.type == "Cast" and {*op.inputs} & problem.step.batched
    )
    assert plan.ops[cast.name].in_specs == (replicated_spec(1),)
    found = infer_batch_axes(plan, problem)
    assert found.batch_axes == ("data",) and cast.name not in found.ops
    laid = partition(problem, found)
    assert laid.specs[cast.outputs[0]] == (Shard(0),)


def test_an_input_that_is_needed_whole_keeps_the_batch_whole():
    problem = problem_of("perceptron")
    (labels,) = (t for t in problem.step.batched if t.shape[1] == 3)
    (reader,) = problem.step.graph.consumers()[labels]
    plan = ByOps(whole=frozenset({reader.type})).solve(problem)
    assert infer_batch_axes(plan, problem) is plan
    laid = partition(problem, plan)
    assert not is_taken_in_rows(laid, [labels], 0)
    assert is_taken_in_rows(laid, problem.step.batched - {labels}, 0)
    summary = plan.summary(laid, full=True)
    assert "batch not split" in summary
    assert sorted(_column(summary, "Its ops take")) == ["S(0) over data", "all of it"]


def test_axes_that_constraints_give_are_left_as_they_are():
    problem = problem_of("perceptron", constraints=[tap.batch()])
    unsaid = ByOps().solve(problem)
    assert infer_batch_axes(unsaid, problem) is unsaid


def test_what_rhino_needs_whole_of_an_input_it_says():
    """A frozen layer is computed by every rank whole; the labels are read in rows."""
    problem = problem_of("frozen")
    plan = find_plan(problem, RhinoPlanner())
    assert plan.ops and not plan.batch_axes
    summary = plan.summary(partition(problem, plan), full=True)
    assert sorted(_column(summary, "Its ops take")) == ["S(0) over model", "all of it"]


def test_any_planner_s_plan_is_read():
    problem = problem_of("perceptron")
    assert find_plan(problem, ByOps()).batch_axes == ("data",)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_alone_and_batches_that_do_not_divide(ranks):
    problem = problem_of("perceptron", mesh=(ranks,))
    assert infer_batch_axes(ByOps().solve(problem), problem).batch_axes == ("data",) * (ranks > 1)
