"""Roles of steps that are saved; those of captured ones are in tests/captured."""

from tests.graphs import saved
from tfpar.ir.roles import BACKWARD, FORWARD, Roles


def test_a_loop_of_the_forward_pass_fills_lists_for_the_backward_pass():
    """The lists bear its names, but neither the loop nor what reads its results belongs to it."""
    step = saved("recurrent")
    roles = Roles.of(step.graph, step.gradient_tensors)
    phases = {op.name: roles.phase[op] for op in step.graph.ops}
    assert phases["functional_1/lstm_1/while"] == FORWARD
    assert phases["functional_1/dense_1/MatMul"] == FORWARD
    backward = [name for name, phase in phases.items() if phase == BACKWARD]
    assert backward and all(name.startswith("gradient_tape/") for name in backward)
