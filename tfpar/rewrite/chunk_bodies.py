"""Bodies of loops, branches and calls that run on chunks of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import FunctionRef, Graph, Op, Tensor, walk_functions


class ChunkBodies:
    """Bodies of loops, branches and calls: one for each chunk where constants differ.

    Args:
        functions: bodies of the program with chunks.
        made: where those of the new one go.
    """

    def __init__(self, functions: dict[str, Graph], made: dict[str, Graph], chunks: int) -> None:
        self._functions = functions
        self._made = made
        self._chunks = chunks

    def of(self, op: Op) -> list[Graph]:
        """The bodies that `op` names."""
        return [body for _, body in walk_functions(Graph(functions=self._functions), op)]

    def differ(self, op: Op) -> bool:
        """Whether the bodies of `op` hold constants of ranks, which chunks may differ in."""
        return any(
            inner.type == "RankConst" or self.differ(inner)
            for body in self.of(op)
            for inner in body.ops
        )

    def attrs(self, op: Op, chunk: int) -> dict[str, Any]:
        """The attributes of `op` for a chunk, naming its bodies there."""
        if not self.of(op):
            return op.attrs
        suffix = f"_chunk{chunk}" if chunk and self.differ(op) else ""
        return {key: self._renamed(value, chunk, suffix) for key, value in op.attrs.items()}

    def _renamed(self, value: Any, chunk: int, suffix: str) -> Any:
        if isinstance(value, list):
            return [self._renamed(v, chunk, suffix) for v in value]
        if not isinstance(value, FunctionRef):
            return value
        name = FunctionRef(value + suffix)
        if name not in self._made:
            self._made[name] = self._body(self._functions[value], chunk)
        return name

    def _body(self, body: Graph, chunk: int) -> Graph:
        """A copy of `body` for one chunk."""
        build = GraphBuilder(Graph(functions=self._made))
        tensors: dict[Tensor, Tensor] = {}
        ops: dict[Op, Op] = {}
        for op in body.ops:
            if op.type == "RankConst":
                build.name = op.name
                values = of_chunk(op, chunk, self._chunks)
                clone = build.per_rank(values, op.outputs[0].dtype).op
            else:
                clone = build.emit(
                    op.type,
                    [tensors[t] for t in op.inputs],
                    [(t.shape, t.dtype) for t in op.outputs],
                    self.attrs(op, chunk),
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


def of_chunk(op: Op, chunk: int, chunks: int) -> list[np.ndarray]:
    """What a constant of ranks is for the ranks of the mesh, in one of their chunks."""
    values: list[np.ndarray] = op.attrs["values"]
    return values[chunk::chunks]
