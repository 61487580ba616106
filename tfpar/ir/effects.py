"""Accesses of ops to what outlives them: variables and other resources, and the outside world.

Two accesses to one resource *conflict* if one of them writes: their order shows in numbers. An op
with an effect on no resource, such as a Python function, accesses the outside world, and writes.
What an op that holds function bodies accesses is what these do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfpar.ir.graph import Graph, Op, Tensor, Variable, function_refs
from tfpar.ir.passes.trim import is_auxiliary
from tfpar.ir.traits import (
    LOOPS,
    REGIONS,
    SIZES,
    SOURCES,
    TRACELESS,
    UNCHANGED,
    VARIABLE_READS,
    body_offset,
    origin,
)

Resource = Tensor | str
"""A handle as it enters a graph; a name, for what needs none."""

OUTSIDE = "the outside world"
"""The resource of effects on anything that is no resource: their order is seen by users."""

_NO_ACCESS = UNCHANGED | SIZES | SOURCES
"""They take a handle, and touch nothing that changes."""


class Access(NamedTuple):
    """An op's access to a resource."""

    op: Op
    writes: bool


class Accesses:
    """Accesses of the ops of a graph and of its function bodies.

    Args:
        functions: bodies by name.
        silent: op types that are marked stateful and have no effect of their own.
    """

    def __init__(self, functions: Mapping[str, Graph], silent: Collection[str] = ()) -> None:
        self._functions = functions
        self._silent = silent
        self._bodies: dict[str, dict[int | str, bool]] = {}

    def of(self, op: Op) -> dict[Resource, bool]:
        """Return by resource whether `op` writes it."""
        if op.type in _NO_ACCESS or op.type in self._silent or is_auxiliary(op.type):
            return {}
        names = [ref for ref in function_refs(*op.attrs.values()) if ref in self._functions]
        if names:
            return self._of_bodies(op, names)
        writes = op.type not in VARIABLE_READS
        handles = [t for t in op.inputs if t.dtype == "resource"]
        if handles:
            return {resource_of(handle): writes for handle in handles}
        makes_one = any(t.dtype == "resource" for t in op.outputs)
        return {OUTSIDE: True} if op.stateful and op.type not in TRACELESS and not makes_one else {}

    def _of_bodies(self, op: Op, names: Iterable[str]) -> dict[Resource, bool]:
        found: dict[Resource, bool] = {}
        taken = op.inputs[body_offset(op.type) :]
        for name in names:
            for key, writes in self._of_body(name).items():
                resource = key if isinstance(key, str) else resource_of(taken[key])
                found[resource] = found.get(resource, False) or writes
        return found

    def _of_body(self, name: str) -> dict[int | str, bool]:
        """By position among a body's arguments, or name, whether it writes a resource."""
        if name not in self._bodies:
            self._bodies[name] = {}  # of a function that calls itself, its other accesses count
            body = self._functions[name]
            position = {tensor: i for i, tensor in enumerate(body.inputs)}
            found: dict[int | str, bool] = {}
            for op in body.ops:
                for resource, writes in self.of(op).items():
                    key = resource if isinstance(resource, str) else position.get(resource)
                    if key is not None:  # else it is gone when the body ends
                        found[key] = found.get(key, False) or writes
            self._bodies[name] = found
        return self._bodies[name]

    def by_resource(self, ops: Iterable[Op]) -> dict[Resource, list[Access]]:
        """Return the accesses of `ops`, in their order, to each resource that one of them
        writes."""
        found: dict[Resource, list[Access]] = {}
        for op in ops:
            for resource, writes in self.of(op).items():
                found.setdefault(resource, []).append(Access(op, writes))
        return {r: each for r, each in found.items() if any(a.writes for a in each)}


def resource_of(handle: Tensor) -> Resource:
    """Return the resource of a handle: the first tensor that refers to it, or a name that is the
    same wherever the handle is made anew."""
    handle = origin(handle, UNCHANGED)
    while handle.op.type in LOOPS:  # they hand on the handles that they take
        handle = origin(handle.op.inputs[handle.index], UNCHANGED)
    if handle.op.type == "VarHandleOp":
        return f"{handle.op.attrs.get('shared_name') or handle.op.name}"
    return handle


def conflicts(accesses: Sequence[Access]) -> Iterator[tuple[Op, Op]]:
    """Pairs of ops that order all conflicting accesses to one resource if each pair is ordered.

    A read follows the last write. A write follows all reads since then; if there is none, the last
    write itself.
    """
    last: Op | None = None
    reads: list[Op] = []
    for op, writes in accesses:
        before = reads if writes and reads else filter(None, [last])
        yield from ((other, op) for other in before)
        if writes:
            last, reads = op, []
        else:
            reads.append(op)


def live_ops(graph: Graph) -> set[Op]:
    """Return the ops that run: whatever an output or an effect waits for."""
    stack = [*(t.op for t in graph.outputs), *graph.effects]
    live: set[Op] = set()
    while stack:
        op = stack.pop()
        if op not in live:
            live.add(op)
            stack += op.predecessors
    return live


# --- lasting effects ------------------------------------------------------------------------


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


# --- updates that wait for no data ----------------------------------------------------------


def find_updates_without(graph: Graph, data: Iterable[Tensor]) -> list[Variable]:
    """Find the variables that some op may write to before any of `data` is there: counters,
    seeds."""
    variables, waiting = graph.variable_of(), {tensor.op for tensor in data}
    found: dict[Variable, None] = {}
    for op in graph.ops:
        if op in waiting or not waiting.isdisjoint(op.predecessors):
            waiting.add(op)
        elif op.type not in VARIABLE_READS:
            found |= {variables[t]: None for t in op.inputs if t in variables}
    return [*found]
