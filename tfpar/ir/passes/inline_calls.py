"""Inlining of what only holds ops or tensors together: calls of functions, and IdentityN.

The ops of a called function take the call's place. What a `tf.function` inside the step computes is
then planned like everything else. Calls that must be compiled by XLA stay calls: XLA runs what the
kernels cannot.
"""

from __future__ import annotations

from collections.abc import Iterable

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.traits import CALLS, VARIABLE_READS


def inline_calls(graph: Graph) -> Graph:
    """Inline every call of `graph` and of its function bodies, in place; returns `graph`.

    Ops get the name of their call as a prefix. Whatever ran after the call runs after
    its effects and its reads of variables, and these run after whatever the call ran after. Each
    body belongs to one op, so its ops are moved, not copied.
    """
    for body in list(graph.functions.values()):
        _inline(body)
    _inline(graph)
    return graph


def _inline(graph: Graph) -> None:
    ops: list[Op] = []
    replaced: dict[Tensor, Tensor] = {}
    effects_of: dict[Op, list[Op]] = {}
    names = {op.name for op in graph.ops}

    def settle(tensors: Iterable[Tensor]) -> list[Tensor]:
        return [replaced.get(t, t) for t in tensors]

    def expand(control: Iterable[Op]) -> list[Op]:
        return list(dict.fromkeys(e for c in control for e in effects_of.get(c, (c,))))

    for op in graph.ops:
        op.inputs = settle(op.inputs)
        op.control = expand(op.control)
        body = _body_of(graph, op)
        if body is None:
            ops.append(op)
            continue
        # Nested calls first: the body may be a caller itself.
        _inline(body)
        sources = {t.op: outer for t, outer in zip(body.inputs, op.inputs, strict=True)}
        inner_to_outer = dict(zip(body.inputs, op.inputs, strict=True))
        names.discard(op.name)
        for inner in body.ops:
            if inner in sources:
                continue
            inner.inputs = [inner_to_outer.get(t, t) for t in inner.inputs]
            inner.control = [c for c in inner.control if c not in sources]
            if inner.stateful:
                inner.control = list(dict.fromkeys([*inner.control, *op.control]))
            inner.name = _unique(f"{op.name}/{inner.name}", names)
            ops.append(inner)
        effects = {e for e in body.effects if e not in sources}
        made = [inner_to_outer.get(t, t) for t in body.outputs]
        replaced.update(zip(op.outputs, made, strict=True))
        after = [o for o in body.ops if o in effects or o.type in VARIABLE_READS]
        after = after or [t.op for t in made]
        effects_of[op] = list(dict.fromkeys([*after, *(op.control if not after else ())]))
    graph.ops = ops
    graph.outputs = settle(graph.outputs)
    graph.effects = expand(graph.effects)


def _body_of(graph: Graph, op: Op) -> Graph | None:
    """The function that `op` calls, unless the call must stay one."""
    if op.type not in CALLS or op.attrs.get("_XlaMustCompile"):
        return None
    body = graph.functions.get(op.attrs["f"])
    if body is None or len(body.inputs) != len(op.inputs):
        return None
    return graph.functions.pop(op.attrs["f"])


def _unique(name: str, used: set[str]) -> str:
    candidate, count = name, 0
    while candidate in used:
        count += 1
        candidate = f"{name}_{count}"
    used.add(candidate)
    return candidate


# --- bundles --------------------------------------------------------------------------------
# Each output of an IdentityN is its own input. Custom gradients and clipping bundle unrelated
# tensors in one IdentityN. Kept as one op it would have to split all of them in the same way.


def split_bundles(graph: Graph) -> Graph:
    """Let readers of an IdentityN read its inputs, in place; returns `graph`.

    One with control inputs is left: its readers wait for something.
    """
    for body in (graph, *graph.functions.values()):
        source: dict[Tensor, Tensor] = {}
        for op in body.ops:
            op.inputs = [source.get(t, t) for t in op.inputs]
            if op.type == "IdentityN" and not op.control:
                source.update(zip(op.outputs, op.inputs, strict=True))
        body.outputs = [source.get(t, t) for t in body.outputs]
    return graph
