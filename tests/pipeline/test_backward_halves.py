"""Which half of the backward pass an op is in: what others wait for, or gradients of weights."""

from __future__ import annotations

import pytest

from tests.pipeline.test_step_stages import N, Step, two_layers
from tfpar.ir import Op, Roles
from tfpar.pipeline.backward_halves import find_weight_half
from tfpar.pipeline.step_graph import Runs
from tfpar.pipeline.step_stages import stages_of_step


def weight_ops(step: Step, met=(), once=()) -> set[str]:
    """The names of the ops of `W`, by which they are asked about."""
    graph = step.build.graph
    roles = Roles.of(graph, step.gradients)
    stage = stages_of_step(graph, roles, step.forward)
    runs = Runs.without_joins(graph, roles)
    each = runs.each - {step.named[name] for name in once}
    runs = Runs(each, frozenset((step.named[name], at) for name, at in met))
    names: dict[Op, str] = {op: name for name, op in step.named.items()}
    return {names[op] for op in find_weight_half(graph, roles, stage, runs)}


@pytest.mark.parametrize("update", [True, False])
def test_gradients_of_weights_are_waited_for_by_nothing_else(update):
    """And the whole backward pass of the first stage: it has nobody to send gradients to."""
    assert weight_ops(two_layers(update)) == {"db", "dh", "da"}


def test_what_leads_to_a_gradient_of_a_weight_alone_goes_with_it():
    step = two_layers(update=False)
    dy = step.named["dy"].outputs[0]
    scaled = step.back("Transpose", "scaled", step.back("Neg", "negative", dy))
    step.gradients[1] = step.back("MatMul", "db_too", step.named["r"].outputs[0], scaled)
    assert {"negative", "scaled", "db_too"} <= weight_ops(step)
    assert "dy" not in weight_ops(step)


def test_what_joins_is_waited_for():
    """A sum over the batch of what is otherwise a weight's: the next pass reads it."""
    step = Step()
    x, a, b = step.fed("x"), step.variable("a"), step.variable("b")
    h = step.op("MatMul", "h", x, step.read(a, "read_a"), stage=0)
    y = step.op("MatMul", "y", h, step.read(b, "read_b"), stage=0)
    dy = step.back("Square", "dy", y)
    mean = step.back("Mean", "mean", dy, shape=(N,))
    ds = step.back("Sub", "ds", dy, mean)
    step.gradients = [step.back("MatMul", "db", h, ds)]
    assert weight_ops(step) == {"dy", "mean", "ds", "db"}
    assert weight_ops(step, met=[("ds", 1)]) == {"ds", "db"}
    scaled = step.back("Neg", "scaled", mean, shape=(N,))
    step.gradients = [step.back("Mul", "again", scaled, ds)]
    assert "mean" in weight_ops(step)
    assert "mean" not in weight_ops(step, once=["scaled"])
