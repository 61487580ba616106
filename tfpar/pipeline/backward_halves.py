"""The two halves of a backward pass, `I` and `W`: what other stages wait for, and the rest."""

from __future__ import annotations

from collections.abc import Mapping

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.roles import BACKWARD, Roles
from tfpar.pipeline.step_graph import Runs


def find_weight_half(
    graph: Graph, roles: Roles, stage: Mapping[Op, int], runs: Runs
) -> frozenset[Op]:
    """Find the ops of the backward pass that lead to gradients of weights alone, in their own
    stage.

    All others lead to what another stage reads of each microbatch, or to what joins. The first
    stage sends no gradients: all of its backward pass is in this half.

    Args:
        stage: of every op.
    """
    consumers = graph.consumers()
    waited: set[Op] = set()

    def waits(reader: Op, tensor: Tensor) -> bool:
        return roles.phase[reader] == BACKWARD and (
            reader in waited
            or reader not in runs.each
            or stage[reader] != stage[tensor.op]
            or any((reader, at) in runs.met for at, t in enumerate(reader.inputs) if t is tensor)
        )

    for op in reversed(graph.ops):
        if roles.phase[op] == BACKWARD:
            given = (t for t in op.outputs if t not in roles.deferrable)
            if any(waits(reader, t) for t in given for reader in consumers.get(t, ())):
                waited.add(op)
    return frozenset(op for op in runs.each if roles.phase[op] == BACKWARD and op not in waited)
