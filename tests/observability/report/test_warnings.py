"""What is said when a step is compiled: once, by name; and in a strict step an error."""

from __future__ import annotations

import logging

import pytest

from tests.compile.steps import mlp_step
from tfpar.ir import GraphBuilder, Op
from tfpar.observability.report.warnings import Warnings
from tfpar.propagation import Anchors, prepare, propagate
from tfpar.spec import Mesh, TfparError, replicated_spec


def prepared(op_type: str):
    step = mlp_step()
    made = GraphBuilder(step.graph, "odd").unary(op_type, step.graph.outputs[0])
    step.graph.outputs.append(made)
    return prepare(step.graph)


def test_an_unknown_op_is_named_once(caplog):
    warnings = Warnings(strict=False)
    with caplog.at_level(logging.WARNING, "tfpar"):
        warnings.fallbacks(prepared("Mystery"))
        warnings.fallbacks(prepared("Mystery"))
        warnings.fallbacks(prepared("Relu"))
    (record,) = caplog.records
    assert "No op rule for Mystery" in record.getMessage()
    assert "first: odd/Mystery" in record.getMessage()


def test_a_strict_step_refuses_an_unknown_op():
    with pytest.raises(TfparError, match=r"Mystery \(first: 'odd/Mystery'\), and strict=True"):
        Warnings(strict=True).fallbacks(prepared("Mystery"))


def test_what_cannot_run_in_chunks_is_named_once(caplog):
    op = mlp_step().graph.effects[0]
    warnings = Warnings(strict=False)
    with caplog.at_level(logging.WARNING, "tfpar"):
        warnings.unchunked(op, 4)
        warnings.unchunked(op, 2)
    (record,) = caplog.records
    assert "'sgd/AssignSubVariableOp' has an effect, which 4 chunks" in record.getMessage()
    with pytest.raises(TfparError, match="Leave out chunks="):
        Warnings(strict=True).unchunked(op, 4)


def test_what_runs_whole_is_named_once(caplog):
    mesh = Mesh.of({"data": 2})
    step = mlp_step()
    laid = propagate(prepare(step.graph), mesh, Anchors(inputs=[replicated_spec(1)]))
    warnings = Warnings(strict=False)
    with caplog.at_level(logging.WARNING, "tfpar"):
        warnings.replicated_regions(laid)
        assert not caplog.records
        laid.replicated_regions = [(step.graph.ops[-1], 0), (step.graph.ops[-2], 0)]
        warnings.replicated_regions(laid)
        warnings.replicated_regions(laid)
    (record,) = caplog.records
    assert f"{step.graph.ops[-1].name} along mesh axis 'data', and 1 more" in record.getMessage()


def test_what_xla_does_not_compile_is_named_once_with_the_first_of_it(caplog):
    ops = [Op("one", "StringJoin"), Op("two", "StringJoin"), Op("three", "PyFunc")]
    warnings = Warnings(strict=False)
    with caplog.at_level(logging.WARNING, "tfpar"):
        warnings.uncompiled(ops)
        warnings.uncompiled(ops)
        warnings.uncompiled([*ops, Op("four", "Unique")])
    both, later = (record.getMessage() for record in caplog.records)
    assert "does not compile PyFunc, StringJoin;" in both and both.endswith("first: one.")
    assert "does not compile Unique;" in later and later.endswith("first: four.")
