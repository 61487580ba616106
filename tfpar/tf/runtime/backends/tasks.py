"""Tasks: parts of a program that are called, several times, by all ranks of a process at once.

A task's function holds the ops of every rank of the process, as the program's own function does,
and its collectives. It is given each tensor once for all ranks that hold the same one, so that
ranks in one memory do not repeat each other inside it either: which ranks do is its *sharing*, for
each tensor and rank the first rank with that tensor.

    two ranks, the input x cut and the weight w replicated:    x: (0, 1)    w: (0, 0)

What a call hands to the next (sums) is shared as it comes out of the function, not as it went into
the first call, where it is zero everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfpar.compile.local.local_graph import LocalProgram
from tfpar.ir.graph import DType, FunctionRef, Graph, Op
from tfpar.tf.runtime.function_def import FunctionWriter, RegisteredFunction, serialize_attrs

if TYPE_CHECKING:
    from tfpar.tf.runtime.backends.linker import Linker

Sharing = tuple[tuple[int, ...], ...]
"""For each tensor and rank (by position among those of the process), the first that shares it."""


@dataclasses.dataclass(frozen=True, eq=False)
class TaskFunction:
    """The function of a task.

    Attributes:
        sharing: of what it is given.
        results: for each of the task's outputs, which of the function's each rank gets.
    """

    function: RegisteredFunction
    sharing: Sharing
    results: Sequence[Sequence[int]]

    def takes(self, given: Sequence[Sequence[str]]) -> bool:
        """Whether ranks that the function takes to share a tensor do, of these edges."""
        return all(
            row[at] == row[first]
            for row, shared in zip(given, self.sharing, strict=True)
            for at, first in enumerate(shared)
        )

    def call(
        self,
        writer: FunctionWriter,
        name: str,
        op: Op,
        given: Sequence[Sequence[str]],
        device: str,
        control: Sequence[str],
    ) -> None:
        """Write a call of it, for `op`, with these edges."""
        pairs = [
            (row[at], tensor.dtype)
            for row, shared, tensor in zip(given, self.sharing, op.inputs, strict=True)
            for at in sorted({*shared})
        ]
        attrs = {
            "f": FunctionRef(self.function.name),
            "Tin": [DType(dtype) for _, dtype in pairs],
            "Tout": [DType(dtype.name) for dtype in self.function.outputs],
        }
        edges = [edge for edge, _ in pairs]
        writer.node(name, "StatefulPartitionedCall", edges, serialize_attrs(attrs), device, control)


def link_task(linker: Linker, op: Op, given: Sequence[Sequence[str]]) -> TaskFunction:
    """The function of the task that `op` calls, for the ranks of `linker`.

    Args:
        given: the edges that it is first called with, for each input and rank.
    """
    sharing = [_sharing(row) for row in given]
    while True:
        task = _link(linker, op, tuple(sharing))
        met = list(sharing)
        for taken, returned in op.attrs["carried"]:
            met[taken] = _meet(sharing[taken], _sharing(task.results[returned]))
        if met == sharing:
            return task
        sharing = met  # finer each time, so that this ends


def _link(linker: Linker, op: Op, sharing: Sharing) -> TaskFunction:
    body: Graph = linker.program.graph.functions[op.attrs["body"]]
    holders = [linker.holders[t] for t in op.inputs if t in linker.holders]
    handles = [b for t, b in zip(op.inputs, body.inputs, strict=True) if t in linker.holders]
    program = LocalProgram(body, linker.mesh, [], [], [], {}, shapes=linker.program.shapes)
    inner = linker.inner(program)
    inner.holders = dict(zip(handles, holders, strict=True))
    name = f"{linker.scope}{op.attrs['body']}"
    inner.open(FunctionWriter(name, linker.writer.bounded))
    for i, (tensor, shared) in enumerate(zip(body.inputs, sharing, strict=True)):
        names = {at: inner.writer.argument(f"in{i}_{at}", tensor.dtype) for at in sorted({*shared})}
        for at, rank in enumerate(inner.ranks):
            inner.edges[rank][tensor] = names[shared[at]]
    for each in body.ops:
        inner.write(each)
    index: dict[tuple[str, str], int] = {}
    for tensor in body.outputs:
        for rank in inner.ranks:
            edge = inner.edges[rank][tensor]
            if (edge, tensor.dtype) not in index:
                index[edge, tensor.dtype] = len(index)
                inner.writer.output(edge, tensor.dtype)
    inner.write_effects()
    results = [
        [index[inner.edges[rank][tensor], tensor.dtype] for rank in inner.ranks]
        for tensor in body.outputs
    ]
    # In one memory a call costs nothing; between devices, arguments would first go to one of them.
    one_memory = len({linker.memories[rank] for rank in linker.ranks}) == 1
    function = inner.writer.register(bodies=inner.registered, inline=not one_memory)
    return TaskFunction(function, sharing, results)


def _sharing(row: Sequence[str] | Sequence[int]) -> tuple[int, ...]:
    """Return, for each position, the first position with the same entry."""
    return tuple(row.index(entry) for entry in row)


def _meet(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    """Positions share where they do in both."""
    pairs = list(zip(one, two, strict=True))
    return tuple(pairs.index(pair) for pair in pairs)
