"""Colocation constraints: forward ops that have to be in one stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.traits import VARIABLE_READS
from tfpar.pipeline.step_stages import can_be_sent


def together(graph: Graph, ops: Sequence[Op]) -> list[tuple[Op, Op]]:
    """(earlier, later) of ops that have to be in one stage: they touch a variable that one of them
    writes, or one reads of the other what cannot be sent: a list, strings, a tensor whose shape is
    known only when the step runs.

    Args:
        ops: those that stages are given for, in the order of the graph.
    """
    members, consumers = set(ops), graph.consumers()
    found = [(t.op, op) for op in ops for t in op.inputs if t.op in members and not can_be_sent(t)]
    for variable in graph.variables:
        touching = [op for op in consumers.get(variable.handle, ()) if op in members]
        if any(op.type not in VARIABLE_READS for op in touching):
            touching += readers_of(variable.handle, consumers, members)
            found += [(touching[0], op) for op in touching[1:]]
    return found


def readers_of(
    handle: Tensor, consumers: Mapping[Tensor, Sequence[Op]], members: Collection[Op]
) -> Iterator[Op]:
    """Yield the members that read a variable's value from an op that is no member itself."""
    for op in consumers.get(handle, ()):
        if op.type in VARIABLE_READS and op not in members:
            for tensor in op.outputs:
                yield from (r for r in consumers.get(tensor, ()) if r in members)
