"""What a local program stores at once: liveness over its ops, calls of tasks included."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tfpar.compile.local import TASK, LocalProgram
from tfpar.ir import Graph, Op, Tensor, traits

FREE = traits.CONSTANTS | traits.SIZES | traits.VARIABLE_READS | {"Placeholder", "RankConst"}


def most_stored(program: LocalProgram) -> int:
    """The most bytes of what ops make that lie at once, if they run in the order of the graph.

    Sums are added up in place, as soon as there is something to add. A task needs beside what it
    gives what lies within it at once.
    """
    within: dict[str, int] = {}

    def passing(op: Op) -> int:
        if op.type != TASK:
            return 0
        name = op.attrs["body"]
        if name not in within:
            body, at = program.graph.functions[name], {made for _, made in op.attrs["carried"]}
            given = sum(t.num_bytes for t in op.outputs if t.index not in at)
            sums = {body.outputs[i] for i in at}
            within[name] = max(0, _most(body, lambda _: 0, sums) - given)
        return within[name]

    return _most(program.graph, passing)


def _most(graph: Graph, passing: Callable[[Op], int], sums: Collection[Tensor] = ()) -> int:
    ops = [op for op in graph.ops if not any(t in sums for t in op.outputs)]
    last: dict[Tensor, Op | None] = {}
    for op in ops:
        for tensor in (*op.inputs, *op.outputs):
            last[_held(tensor)] = op
    last.update((_held(tensor), None) for tensor in graph.outputs if tensor not in sums)
    stored: dict[Tensor, int] = {}
    most = 0
    for op in ops:
        for tensor in op.outputs:
            is_sized = tensor.is_static and tensor.dtype != "resource"
            if _held(tensor) is tensor and op.type not in FREE and is_sized:
                stored[tensor] = tensor.num_bytes
        most = max(most, sum(stored.values()) + passing(op))
        stored = {tensor: size for tensor, size in stored.items() if last[tensor] is not op}
    return most


def _held(tensor: Tensor) -> Tensor:
    """What holds the bytes of a tensor: what it is a view of, or the sum that a task goes on."""
    while True:
        op = tensor.op
        goes_on = {made: given for given, made in op.attrs.get("carried", ())}
        if op.type in traits.VIEWS - traits.CONSTANTS and op.inputs:
            tensor = op.inputs[0]
        elif tensor.index in goes_on:
            tensor = op.inputs[goes_on[tensor.index]]
        else:
            return tensor
