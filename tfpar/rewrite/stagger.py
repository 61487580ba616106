"""The order of chunks: one computes once the one before it has sent what it has (ATP Fig. 8).

A *stage* is what a chunk computes between two collectives. Where a stage begins, a chunk waits
until the chunk before it has computed what the collectives of that stage carry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tfpar.ir.graph import Graph, Op
from tfpar.ir.order import sort_topologically
from tfpar.ir.traits import SOURCES
from tfpar.rewrite.reshard import COLLECTIVE_TYPES

_UNORDERED = SOURCES.union(COLLECTIVE_TYPES)
"""Op types that backends give no control edges."""


def stagger(graph: Graph, runs_for: Mapping[Op, frozenset[int]], chunks: int) -> None:
    """Add control edges between the chunks of `graph`, in place.

    No edge closes a cycle: along every edge (stage, first chunk) does not decrease, and along a
    new one it increases.

    Args:
        runs_for: the chunks for which an op runs, where these are not all `chunks`.
    """
    everyone = frozenset(range(chunks))
    here = {op: runs_for.get(op, everyone) for op in graph.ops}
    stages = _stages(graph, here)
    sent: dict[tuple[int, int], list[Op]] = {}  # by stage and chunk, what its collectives carry
    for op in runs_for:
        for maker in (t.op for t in op.inputs if op.type in COLLECTIVE_TYPES):
            if maker in runs_for and maker.type not in _UNORDERED:
                sent.setdefault((stages[maker], min(here[maker])), []).append(maker)
    for op in runs_for:
        chunk = min(here[op])
        if op.type not in _UNORDERED and not any(
            stages[b] == stages[op] and min(here[b]) == chunk
            for b in _before(op)
            if b.type not in _UNORDERED
        ):
            before = sent.get((stages[op], chunk - 1), ())
            op.control = list(dict.fromkeys((*op.control, *before)))
    graph.ops = sort_topologically(graph.ops)


def _stages(graph: Graph, here: Mapping[Op, frozenset[int]]) -> dict[Op, int]:
    """How many collectives, and other meetings of chunks, each op comes after."""
    stages: dict[Op, int] = {}
    for op in graph.ops:
        stages[op] = max(
            (
                stages[b] + (b.type in COLLECTIVE_TYPES or not here[op] <= here[b])
                for b in _before(op)
            ),
            default=0,
        )
    return stages


def _before(op: Op) -> Iterator[Op]:
    yield from (t.op for t in op.inputs)
    yield from op.control
