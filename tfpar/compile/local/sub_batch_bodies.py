"""Bodies of loops, branches and calls that run on a part of a rank's batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import FunctionRef, Graph, Op, Tensor, walk_functions


class SubBatchBodies:
    """Bodies of loops, branches and calls: one for each part where constants differ.

    Args:
        functions: bodies of the program whose last mesh axis are the parts.
        made: where those of the new one go.
        rank: of the new one, whose shapes its tensors have; see `GraphBuilder`.
    """

    def __init__(
        self, functions: dict[str, Graph], made: dict[str, Graph], parts: int, rank: int = 0
    ) -> None:
        self._functions = functions
        self._made = made
        self._parts = parts
        self._rank = rank

    def of(self, op: Op) -> list[Graph]:
        """Return the bodies that `op` names."""
        return [body for _, body in walk_functions(Graph(functions=self._functions), op)]

    def differ(self, op: Op) -> bool:
        """Whether the bodies of `op` hold constants of ranks, which parts may differ in."""
        return any(
            inner.type == "RankConst" or self.differ(inner)
            for body in self.of(op)
            for inner in body.ops
        )

    def attrs(self, op: Op, part: int) -> dict[str, Any]:
        """Return the attributes of `op` for a part, naming its bodies there."""
        if not self.of(op):
            return op.attrs
        suffix = f"_part{part}" if part and self.differ(op) else ""
        return {key: self._renamed(value, part, suffix) for key, value in op.attrs.items()}

    def _renamed(self, value: Any, part: int, suffix: str) -> Any:
        if isinstance(value, list):
            return [self._renamed(v, part, suffix) for v in value]
        if not isinstance(value, FunctionRef):
            return value
        name = FunctionRef(value + suffix)
        if name not in self._made:
            self._made[name] = self._body(self._functions[value], part)
        return name

    def _body(self, body: Graph, part: int) -> Graph:
        """A copy of `body` for one part."""
        build = GraphBuilder(Graph(functions=self._made), rank=self._rank)
        tensors: dict[Tensor, Tensor] = {}
        ops: dict[Op, Op] = {}
        for op in body.ops:
            if op.type == "RankConst":
                build.name = op.name
                values = constant_of_sub_batch(op, part, self._parts)
                clone = build.per_rank(values, op.outputs[0].dtype).op
            else:
                clone = build.emit(
                    op.type,
                    [tensors[t] for t in op.inputs],
                    [(t.shape, t.dtype) for t in op.outputs],
                    self.attrs(op, part),
                    op.name,
                    [ops[c] for c in op.control],
                    op.stateful,
                )
            ops[op] = clone
            tensors.update(zip(op.outputs, clone.outputs, strict=True))
        graph = build.graph
        graph.inputs = [tensors[t] for t in body.inputs]
        graph.outputs = [tensors[t] for t in body.outputs]
        graph.effects = [ops[e] for e in body.effects]
        return graph


def constant_of_sub_batch(op: Op, part: int, parts: int) -> list[np.ndarray]:
    """Return the values of a constant that differs by rank, for one part of each rank of the
    mesh."""
    values: list[np.ndarray] = op.attrs["values"]
    return values[part::parts]
