"""Lasting effects of a step, which restoring its variables does not undo."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tfpar.ir.graph import Graph, Op, function_refs
from tfpar.ir.traits import REGIONS, TRACELESS


def find_lasting_effect(graph: Graph) -> Op | None:
    """Find the first op with an effect other than on a variable, in whatever body; None if none
    has.

    Draws are none: their state is a kernel's own, and a program that is linked anew begins anew.
    """
    return next(_lasting(graph.ops, graph), None)


def _lasting(ops: Iterable[Op], graph: Graph) -> Iterator[Op]:
    for op in ops:
        if op.type in REGIONS:
            for name in function_refs(*op.attrs.values()):
                if name in graph.functions:
                    yield from _lasting(graph.functions[name].ops, graph)
        elif op.stateful and op.type not in TRACELESS:
            if all(tensor.dtype != "resource" for tensor in op.inputs):
                yield op
