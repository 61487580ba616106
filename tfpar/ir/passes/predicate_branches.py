"""Predication: branches that write variables become straight-line ops.

A rank cannot take part in a collective from inside a branch, nor can a slot follow its weight
where the update is out of sight (gradient accumulation, loss scaling). Both branches run instead,
and what the branch that is not taken writes changes nothing: it assigns the value that
is there, or adds zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import DType, Graph, Op, Tensor, walk_functions
from tfpar.ir.traits import CONDITIONALS, REFERENCES, REPEATABLE

_ADDS = frozenset(
    {
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "ResourceScatterAdd",
        "ResourceScatterSub",
        "ResourceScatterNdAdd",
        "ResourceScatterNdSub",
    }
)
# What lies where they write, as an op of the same handle and indices.
_READ_BEFORE = {
    "AssignVariableOp": "ReadVariableOp",
    "ResourceScatterUpdate": "ResourceGather",
    "ResourceScatterNdUpdate": "ResourceGatherNd",
}


def predicate_branches(graph: Graph) -> Graph:
    """Predicate the branches that write variables, in place; returns `graph`.

    Branches with other effects (a Python function, a generator's state) stay.
    """
    for body in list(graph.functions.values()):
        _predicate(body)
    _predicate(graph)
    return graph


def _predicate(graph: Graph) -> None:
    if any(_is_candidate(graph, op) for op in graph.ops):
        _Predication(graph).run()


def _bodies(graph: Graph, op: Op) -> list[Graph]:
    names = [op.attrs["then_branch"], op.attrs["else_branch"]]
    return [graph.functions[n] for n in names if n in graph.functions]


def _is_candidate(graph: Graph, op: Op) -> bool:
    if op.type not in CONDITIONALS or op.inputs[0].dtype != "bool":
        return False
    bodies = _bodies(graph, op)
    if len(bodies) != 2 or any(t.dtype in REFERENCES for t in op.outputs):
        return False
    if any(a.shape != b.shape for a, b in zip(bodies[0].outputs, bodies[1].outputs, strict=True)):
        return False
    for body in bodies:
        _predicate(body)
    inner = [o for body in bodies for o in body.ops]
    return any(map(_is_write, inner)) and all(_is_write(o) or _is_harmless(graph, o) for o in inner)


def _is_write(op: Op) -> bool:
    return op.type in _ADDS or op.type in _READ_BEFORE


def _is_harmless(graph: Graph, op: Op) -> bool:
    """Whether running `op` needlessly changes nothing."""
    if not op.stateful or op.type in REPEATABLE:
        return True
    bodies = [body for _, body in walk_functions(graph, op)]
    return bool(bodies) and all(_is_harmless(graph, o) for body in bodies for o in body.ops)


class _Predication:
    """Rewrites one graph; each body belongs to one op, so its ops are moved, not copied."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.source = graph.ops
        graph.ops = []
        self.build = GraphBuilder(graph)
        for op in self.source:
            self.build.unique_name(op.name)
        self.replaced: dict[Tensor, Tensor] = {}
        self.effects: dict[Op, list[Op]] = {}

    def run(self) -> None:
        graph = self.graph
        for op in self.source:
            op.inputs = [self.replaced.get(t, t) for t in op.inputs]
            op.control = self._expanded(op.control)
            if _is_candidate(graph, op):
                self._branch(op)
            else:
                graph.ops.append(op)
        graph.outputs = [self.replaced.get(t, t) for t in graph.outputs]
        graph.effects = self._expanded(graph.effects)

    def _expanded(self, ops: Sequence[Op]) -> list[Op]:
        return list(dict.fromkeys(e for op in ops for e in self.effects.get(op, (op,))))

    def _branch(self, op: Op) -> None:
        bodies = _bodies(self.graph, op)
        self.build.name = op.name
        taken = op.inputs[0]
        guards = [taken, self.build.unary("LogicalNot", taken)]
        touched: dict[Tensor, list[Op]] = {}
        made = []
        for body, guard, label in zip(bodies, guards, ("then", "else"), strict=True):
            before = {t: list(ops) for t, ops in touched.items()}
            made.append(self._inline(op, body, guard, label, before, touched))
        for output, a, b in zip(op.outputs, *made, strict=True):
            self.replaced[output] = a if a is b else self.build.select(taken, a, b)
        self.effects[op] = list(dict.fromkeys(o for ops in touched.values() for o in ops))
        for key in ("then_branch", "else_branch"):
            self.graph.functions.pop(op.attrs[key])

    def _inline(
        self,
        op: Op,
        body: Graph,
        guard: Tensor,
        label: str,
        before: dict[Tensor, list[Op]],
        touched: dict[Tensor, list[Op]],
    ) -> list[Tensor]:
        """Move the ops of `body` here; those on a handle run after the ops `before` on it."""
        arguments = dict(zip(body.inputs, op.inputs[1:], strict=True))
        sources = {t.op for t in body.inputs}
        for inner in body.ops:
            if inner in sources:
                continue
            inner.inputs = [arguments.get(t, t) for t in inner.inputs]
            inner.control = [c for c in inner.control if c not in sources]
            inner.name = self.build.unique_name(f"{op.name}/{label}/{inner.name}")
            handles = [t for t in inner.inputs if t.dtype == "resource"]
            waits = [o for t in handles for o in before.get(t, ())]
            if inner.stateful:
                inner.control = list(dict.fromkeys([*inner.control, *op.control, *waits]))
            if _is_write(inner):
                self._guard(inner, guard)
            self.graph.ops.append(inner)
            for handle in handles:
                touched.setdefault(handle, []).append(inner)
        return [arguments.get(t, t) for t in body.outputs]

    def _guard(self, write: Op, guard: Tensor) -> None:
        """Make `write` change nothing where `guard` is false."""
        self.build.name = write.name
        value = write.inputs[-1]
        if write.type in _ADDS:
            other = self.build.const(0, value.dtype)
        else:
            arguments = write.inputs[:-1]
            attrs: dict[str, Any] = {"dtype": DType(value.dtype)}
            if len(arguments) > 1:
                attrs["Tindices"] = DType(arguments[1].dtype)
            if write.type == "ResourceScatterUpdate":
                attrs |= {"batch_dims": 0, "validate_indices": True}
            read = self.build.emit(
                _READ_BEFORE[write.type],
                arguments,
                [(value.shape, value.dtype)],
                attrs,
                control=write.control,
                stateful=True,
            )
            write.control = [*write.control, read]
            other = read.outputs[0]
        write.inputs[-1] = self.build.select(guard, value, other)
