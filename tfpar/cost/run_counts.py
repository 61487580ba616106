"""Number of runs of each op of a step whose last mesh axis are microbatches, read off its specs."""

from __future__ import annotations

from tfpar.ir.graph import Op
from tfpar.ir.roles import Roles
from tfpar.ir.traits import SOURCES
from tfpar.pipeline.statistics import EXACT, BatchStatistics
from tfpar.pipeline.step_graph import Runs
from tfpar.propagation.partitioned_graph import Decision, PartitionedGraph
from tfpar.spec import Replicate


def count_runs(laid: PartitionedGraph, roles: Roles, statistics: BatchStatistics = EXACT) -> Runs:
    """Find what runs once for each microbatch, and which of it needs all of them.

    One microbatch is the whole batch: it waits for no others.

    Args:
        laid: the step on a mesh with the axis of the microbatches behind its own.
        statistics: those that each microbatch has of its own.
    """
    if laid.mesh.shape[-1] == 1:
        return Runs.without_joins(laid.graph, roles)
    return _runs(laid, statistics)


def _runs(laid: PartitionedGraph, statistics: BatchStatistics = EXACT) -> Runs:
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
        if decision.expansion is not None and op not in statistics.sums:
            met |= {(op, position) for position in _met_within(decision.expansion)}
    return Runs(frozenset(each), frozenset(met))


def _met_within(expansion: PartitionedGraph) -> set[int]:
    """The inputs of which an op needs all microbatches while it runs for each: its decomposition
    adds up what is made of them, and goes on with that."""
    runs = _runs(expansion)
    read: dict[Op, set[int]] = {t.op: {i} for i, t in enumerate(expansion.graph.inputs)}
    awaited: dict[Op, set[int]] = {}
    found: set[int] = set()
    for op in expansion.graph.ops:
        own, others = read.setdefault(op, set()), awaited.setdefault(op, set())
        for position, tensor in enumerate(op.inputs):
            (others if (op, position) in runs.met else own).update(read[tensor.op])
            others |= awaited[tensor.op]
        if op in runs.each:
            found |= others
    return found


def runs_in_parts(decision: Decision) -> bool:
    """Whether an op that runs so does once for each part of the batch."""
    specs = (*decision.strategy.in_specs, *decision.strategy.out_specs)
    return any(not isinstance(spec[-1], Replicate) for spec in specs)
