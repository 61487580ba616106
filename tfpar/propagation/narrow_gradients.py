"""Narrow gradients: collectives stand on the 16-bit side of a Cast.

Most of that needs nothing done. A Cast down runs on whatever part a rank has, and a Partial is
carried through it since that costs fewer bytes (`deferral`); before a Cast up it is reduced for the
same reason. One case is left: a gradient that comes split in one way, is cast up, goes through the
optimizer's arithmetic and only then meets its weight, split in another way. It is moved before the
cast.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.roles import NARROW
from tfpar.ir.traits import WHOLE_UPDATES
from tfpar.rules.rule import OpRule


def find_narrow_gradients(graph: Graph, rules: Mapping[Op, OpRule]) -> frozenset[Tensor]:
    """Find the 16-bit tensors of which nothing is made but, entry by entry, updates of
    variables."""
    readers = graph.consumers()
    returned = set(graph.outputs)
    updating: set[Tensor] = set()
    for op in reversed(graph.ops):
        for tensor in op.outputs:
            if tensor in readers and tensor not in returned:
                if all(_only_updates(r, rules[r], updating) for r in readers[tensor]):
                    updating.add(tensor)
    return frozenset(
        t for t in updating if t.dtype in NARROW and all(_casts_up(r) for r in readers[t])
    )


def _only_updates(op: Op, rule: OpRule, updating: set[Tensor]) -> bool:
    if op.type in WHOLE_UPDATES:
        return True
    return bool(op.outputs) and not rule.reduce and all(t in updating for t in op.outputs)


def _casts_up(op: Op) -> bool:
    return op.type == "Cast" and op.outputs[0].dtype not in NARROW
