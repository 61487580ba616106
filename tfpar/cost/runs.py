"""How often the ops of a step run whose last mesh axis are microbatches, read off its specs."""

from __future__ import annotations

from tfpar.ir.roles import Roles
from tfpar.ir.traits import SOURCES
from tfpar.pipeline.statistics import EXACT, BatchStatistics
from tfpar.pipeline.step_graph import Runs
from tfpar.propagation.partitioned import Decision, PartitionedGraph
from tfpar.spec import Replicate


def runs_of(laid: PartitionedGraph, roles: Roles, statistics: BatchStatistics = EXACT) -> Runs:
    """What runs once for each microbatch, and which of it needs all of them.

    One microbatch is the whole batch: it waits for no others.

    Args:
        laid: the step on a mesh with the axis of the microbatches behind its own.
        statistics: those that each microbatch has of its own.
    """
    if laid.mesh.shape[-1] == 1:
        return Runs.without_joins(laid.graph, roles)
    each = {
        op
        for op, decision in laid.decisions.items()
        if runs_in_parts(decision) and op.type not in SOURCES
    }
    each |= statistics.each
    met = set()
    for op, decision in laid.decisions.items():
        for position, tensor in enumerate(op.inputs):
            maker = laid.decisions.get(tensor.op)
            if maker is not None and tensor.op not in statistics.sums:
                made = maker.strategy.out_specs[tensor.index][-1]
                if not isinstance(made, Replicate) and (
                    decision.strategy.in_specs[position][-1] != made
                ):
                    met.add((op, position))
    return Runs(frozenset(each), frozenset(met))


def runs_in_parts(decision: Decision) -> bool:
    """Whether an op that runs so does once for each part of the batch."""
    specs = (*decision.strategy.in_specs, *decision.strategy.out_specs)
    return any(not isinstance(spec[-1], Replicate) for spec in specs)
