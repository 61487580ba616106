"""What stages send each other as a graph stands, without any rule of what need not be sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tfpar.ir import Graph, Op, Tensor


class Sent(NamedTuple):
    """A tensor that is made in one stage and read in another."""

    tensor: Tensor
    source: int
    target: int


def sent(graph: Graph, stage: Mapping[Op, int]) -> list[Sent]:
    """Each once to a stage that reads it, in the order in which they are made."""
    readers = graph.consumers()
    return [
        Sent(tensor, stage[op], target)
        for op in graph.ops
        for tensor in op.outputs
        for target in sorted({stage[r] for r in readers.get(tensor, ())} - {stage[op]})
    ]
