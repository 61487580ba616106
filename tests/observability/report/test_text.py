"""Summaries, explanations and coverage, as text."""

import builtins
import dataclasses
import sys

import numpy as np
import pytest

from tests.plan.graphs import mlp, partition
from tfpar.constraints import batch, shard
from tfpar.cost import Cost
from tfpar.ir import DType, FunctionRef, Graph, GraphBuilder
from tfpar.observability.report.coverage import coverage
from tfpar.observability.report.data.build import build_report
from tfpar.observability.report.data.diagnosis import PlanDiagnosis
from tfpar.observability.report.data.schema import Axis
from tfpar.plans import plan_from_constraints
from tfpar.spec import ArgumentError, Mesh, PlanError, format_bytes

MESH = Mesh.of([2, 4])


COLUMN = shard(".*fc1/kernel", 1, "model")


def planned(mesh=MESH, constraints=(COLUMN,), **graph):
    graph = mlp(**graph)
    plan = plan_from_constraints(graph, mesh, constraints)
    return plan, partition(graph, plan)


def test_in_a_notebook_tables_are_part_of_the_text(monkeypatch):
    """Rich shows them by itself where a kernel runs."""
    plan, partitioned = planned()
    expected = plan.summary(partitioned)
    kernel = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", kernel, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", None)  # nothing may be displayed
    assert "| Layer" in expected and plan.summary(partitioned) == expected


def row(text: str, name: str) -> list[str]:
    """The cells of the table row that starts with `name`."""
    line = next(x for x in text.splitlines() if x.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_summary_of_a_plan_alone():
    plan, _ = planned()
    text = plan.summary(full=True)
    assert "mesh data=2 x model=4 (8 ranks), batch split over data" in text
    assert row(text, "block_0/fc1/kernel")[1:] == ["(6, 10)", "S(1) over model", "240 B", "72 B"]
    assert row(text, "head/bias")[2:] == ["left to propagation", "20 B", "?"]
    assert "Collectives" not in text


def test_summary_of_what_was_partitioned():
    plan, partitioned = planned(hidden=16, momentum=True)
    text = plan.summary(partitioned, full=True)
    assert row(text, "block_0/fc2/kernel")[2:] == ["S(0) over model", "384 B", "96 B"]
    assert row(text, "3 optimizer and other state")[2] == "2 sharded, as their weights"
    reduced = {axes: size for kind, axes, size in partitioned.collectives()}
    assert set(reduced) == {("model",), ("data",)}
    for axes, size in reduced.items():
        assert f"| all_reduce | {axes[0]:5} |     1 | {format_bytes(size):>14} |" in text
    assert "Padding: none" in text and "every op has a rule" in text
    assert plan.with_partitioned(partitioned).summary(full=True) == text


def test_summary_says_how_many_ranks_would_do_as_well():
    said = "6 of 8 ranks compute what others compute too, as nothing is split along model: 2 would"
    plan, partitioned = planned(constraints=(batch("data"),))
    assert said in plan.summary(partitioned)
    plan, partitioned = planned()
    assert "would do as well" not in plan.summary(partitioned)


def test_stages_compute_each_its_own():
    def said(ranks: int, *axes: Axis) -> str:
        plan = plan_from_constraints(mlp(), Mesh.of([1]), ())
        report = build_report(plan)
        facts = dataclasses.replace(report.facts, ranks=ranks, mesh=axes, splits_anything=False)
        return " ".join(PlanDiagnosis(dataclasses.replace(report, facts=facts)).warnings())

    assert not said(4, Axis("data", 1))
    assert said(4, Axis("data", 2)).startswith("2 of 4 ranks compute what others compute too")


@pytest.mark.parametrize("wait_s, why", [(0.0, "communication would"), (0.6, "hosts issue ops")])
def test_why_every_rank_computes_the_same_is_said(wait_s, why):
    cost = Cost(1.0, (0.1, 0.2, 0.1), (0.0,) * 3, 0.0, 0.0, 1, host_wait_s=wait_s)
    plan = plan_from_constraints(mlp(), Mesh.of([1]), ()).with_findings(cost=cost)
    report = build_report(plan)
    axes = (Axis("data", 2),)
    facts = dataclasses.replace(report.facts, ranks=2, mesh=axes, splits_anything=False)
    (first, *_) = PlanDiagnosis(dataclasses.replace(report, facts=facts)).warnings()
    assert first.startswith(f"Every rank computes the same: {'' if wait_s else 'for this'}")
    assert why in first


def test_summary_reports_padding_and_fallbacks():
    plan, partitioned = planned(unknown=True)
    text = plan.summary(partitioned, full=True)
    assert "3 variables, 104 B in all: block_0/fc1/kernel, block_0/fc1/bias," in text
    assert row(text, "Mystery") == ["Mystery", "1", "loss/Mystery"]


def test_summary_is_plain_text():
    plan, partitioned = planned()
    text = plan.summary(partitioned, full=True)
    assert text.isascii() and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_summary_without_a_split_batch():
    plan, partitioned = planned(mesh=Mesh.of([1]), constraints=(batch(),))
    text = plan.summary(partitioned, full=True)
    assert "(1 rank), batch not split" in text and "Collectives of one step: none" in text


def test_long_names_fold():
    name = "/".join(["quite_a_long_layer_name"] * 8)
    plan, _ = planned(prefix=f"{name}/")
    assert max(map(len, plan.summary(full=True).splitlines())) <= 120


def test_full_is_true_or_false():
    plan, _ = planned()
    with pytest.raises(ArgumentError, match="full is array"):
        plan.summary(full=np.ones(3))


# --- explain ---------------------------------------------------------------------


def test_explain_gives_the_reason():
    plan, partitioned = planned(hidden=16, momentum=True)
    text = plan.explain("block_0/fc1/kernel", partitioned)
    assert "S(1) over model (R,S(1) on data=2 x model=4)" in text
    assert "(6, 4), 96 B" in text
    assert "Why: shard('.*fc1/kernel', dim=1, axis='model')" in text
    assert "MatMul 'mlp/block_0/fc1/MatMul': [S(0),R] [R,S(1)] -> [S(0),S(1)]" in text
    text = plan.explain("block_0/fc2/kernel", partitioned)
    assert "laid as its first reader wants it, 'mlp/block_0/fc2/MatMul'" in text
    assert "mlp/block_0/fc2/MatMul:0: S(0),P(sum) -> S(0),R (all_reduce over model)" in text
    text = plan.explain("sgd/block_0_fc2_kernel_momentum", partitioned)
    assert "updated along with 'block_0/fc2/kernel'" in text


def test_explain_without_propagation():
    plan, _ = planned()
    assert "Left to propagation" in plan.explain("head/kernel")
    assert "Why: shard(" in plan.explain("block_0/fc1/kernel")


def test_explain_unknown_variable_names_the_nearest():
    plan, _ = planned()
    with pytest.raises(PlanError, match="no variable 'head/kernal'.*'head/kernel'"):
        plan.explain("head/kernal")


def test_explain_by_the_end_of_a_path():
    plan, partitioned = planned(prefix="gpt/")
    assert plan.explain("fc1/kernel", partitioned).startswith("Variable 'gpt/block_0/fc1/kernel'")
    with pytest.raises(PlanError, match="several variables 'kernel'.*'gpt/block_0/fc1/kernel'"):
        plan.explain("kernel")


# --- coverage --------------------------------------------------------------------


def test_coverage_of_a_known_graph_is_complete():
    found = coverage(mlp())
    assert found.complete and not found.without_rule()
    assert {o.op_type: o.count for o in found.op_types}["MatMul"] == 3


def _with_loop() -> Graph:
    """A graph with an unknown op in a loop body, and a reshape to unknown sizes."""
    body = GraphBuilder()
    x = body.emit("Placeholder", (), [((4,), "float32")], {"dtype": DType("float32")}).outputs[0]
    body.graph.inputs.append(x)
    body.graph.outputs.append(body.one("Mystery", (x,), (4,), "float32"))
    build = GraphBuilder()
    build.graph.functions["loop_body"] = body.graph
    y = build.emit("Placeholder", (), [((4,), "float32")], {"dtype": DType("float32")}).outputs[0]
    build.graph.inputs.append(y)
    for _ in range(2):
        attrs = {"f": FunctionRef("loop_body")}
        y = build.emit("PartitionedCall", (y,), [((4,), "float32")], attrs).outputs[0]
    build.graph.outputs.append(build.one("Relu", (y,), None, "float32"))
    return build.graph


def test_coverage_tells_partial_from_fallback_and_enters_bodies():
    found = coverage(_with_loop())
    by_type = {o.op_type: o for o in found.op_types}
    assert not found.complete and found.without_rule() == ("Mystery", "Relu")
    assert by_type["Mystery"].status == "fallback" and by_type["Mystery"].count == 1
    assert by_type["Relu"].status == "partial"
    assert by_type["PartitionedCall"].status == "rule"
    text = str(found)
    assert row(text, "Mystery")[1:4] == ["1", "fallback", "1"]
    assert "2 run replicated" in text
    lines = text.splitlines()
    first = next(i for i, x in enumerate(lines) if x.startswith("| Mystery"))
    assert first < next(i for i, x in enumerate(lines) if x.startswith("| Placeholder"))
