"""The order of chunks: each computes once the one before it has something to send (ATP Fig. 8).

An *interval* is what a chunk computes between two collectives. Here are two products in two
chunks; each result of the first product is added up over ranks:

    interval 0            collective             interval 1
    x0 = a0 @ w           s0 = AllReduce(x0)     y0 = s0 @ v        chunk 0
    x1 = a1 @ w           s1 = AllReduce(x1)     y1 = s1 @ v        chunk 1

Nothing in the graph says whether `x1` is computed before `x0`, after it, or at the same time. An
op that begins an interval of a chunk is therefore made to wait for what the chunk before it hands
to collectives in the same interval: `x1` gets a control edge from `x0`. So `x0` is done first, and
`s0` is on its way while `x1` is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tfpar.compile.local.reshard import COLLECTIVE_TYPES
from tfpar.ir.graph import Graph, Op
from tfpar.ir.order import sort_topologically
from tfpar.ir.traits import SOURCES

_UNORDERED = SOURCES.union(COLLECTIVE_TYPES)
"""Op types that backends give no control edges."""


def stagger_chunks(graph: Graph, runs_for: Mapping[Op, frozenset[int]], chunks: int) -> None:
    """Add control edges between the chunks of `graph`, in place.

    No edge closes a cycle: along every edge (interval, first chunk) does not decrease, and along a
    new one it increases.

    Args:
        runs_for: the chunks for which an op runs, where these are not all `chunks`.
    """
    everyone = frozenset(range(chunks))
    here = {op: runs_for.get(op, everyone) for op in graph.ops}
    intervals = _intervals(graph, here)
    sent: dict[tuple[int, int], list[Op]] = {}  # by interval and chunk, what collectives carry
    for op in runs_for:
        for maker in (t.op for t in op.inputs if op.type in COLLECTIVE_TYPES):
            if maker in runs_for and maker.type not in _UNORDERED:
                sent.setdefault((intervals[maker], min(here[maker])), []).append(maker)
    for op in runs_for:
        chunk = min(here[op])
        if op.type not in _UNORDERED and not any(
            intervals[b] == intervals[op] and min(here[b]) == chunk
            for b in _before(op)
            if b.type not in _UNORDERED
        ):
            before = sent.get((intervals[op], chunk - 1), ())
            op.control = list(dict.fromkeys((*op.control, *before)))
    graph.ops = sort_topologically(graph.ops)


def _intervals(graph: Graph, here: Mapping[Op, frozenset[int]]) -> dict[Op, int]:
    """Count the collectives, and other meetings of chunks, that precede each op."""
    intervals: dict[Op, int] = {}
    for op in graph.ops:
        intervals[op] = max(
            (
                intervals[b] + (b.type in COLLECTIVE_TYPES or not here[op] <= here[b])
                for b in _before(op)
            ),
            default=0,
        )
    return intervals


def _before(op: Op) -> Iterator[Op]:
    yield from (t.op for t in op.inputs)
    yield from op.control
