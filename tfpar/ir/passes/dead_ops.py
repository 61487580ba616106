"""Removal of ops that nothing needs, for passes that leave some behind."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.ir.graph import Graph, Op


def without_dead(graph: Graph, ops: Sequence[Op]) -> list[Op]:
    """Return `ops` without those that have no effect and that nothing reads or waits for.

    Args:
        ops: of the graph, each behind those that it reads or waits for.
    """
    needed = {t.op for t in (*graph.inputs, *graph.outputs, *(v.handle for v in graph.variables))}
    needed.update(graph.effects)
    kept = []
    for op in reversed(ops):
        if op in needed or op.stateful:
            needed.update(t.op for t in op.inputs)
            needed.update(op.control)
            kept.append(op)
    return kept[::-1]
