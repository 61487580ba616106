"""Rereads: tensors of a block, a set of forward ops, that the backward pass reads again; when it
does, and rewiring of it to read other tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from tfpar.ir.graph import Graph, Op, Tensor
from tfpar.ir.order import sort_topologically
from tfpar.ir.passes.trim import clone_op
from tfpar.ir.roles import BACKWARD, FORWARD, Roles
from tfpar.ir.traits import SIZES


def find_fed(graph: Graph) -> frozenset[Op]:
    """Return the ops whose results depend on what the step is fed, by more than its sizes."""
    found = {t.op for t in graph.inputs}
    for op in graph.ops:
        if op.type not in SIZES and any(t.op in found for t in op.inputs):
            found.add(op)
    return frozenset(found)


def is_reread(readers: Sequence[Op], inside: Collection[Op], roles: Roles) -> bool:
    """Whether the backward pass reads a tensor of the block, and no later forward op does."""
    if any(roles.phase[r] == FORWARD and r not in inside for r in readers):
        return False
    return any(reads_recomputed(r, roles) for r in readers)


def find_arrival(
    ops: Sequence[Op], block: Collection[Op], reread: Collection[Tensor], roles: Roles
) -> tuple[Op, Op] | None:
    """(the op that makes the gradient which arrives at the block, the first op to need a clone).

    That gradient depends on forward ops that follow the block, but on no clone: waiting for it
    closes no cycle.

    Args:
        ops: in graph order, from the block's first on.
    """
    following: set[Op] = set()
    needing: set[Op] = set()
    first: Op | None = None
    for op in ops:
        phase, sources = roles.phase[op], [t.op for t in op.inputs]
        if any(o in following for o in sources) or (
            phase == FORWARD and op not in block and any(o in block for o in sources)
        ):
            following.add(op)
        if phase != BACKWARD:
            continue
        reads = reads_recomputed(op, roles) and any(t in reread for t in op.inputs)
        if reads or any(o in needing for o in (*sources, *op.control)):
            needing.add(op)
            first = first or op
            for source in sources:
                arrives = source in following and source not in needing
                if arrives and roles.phase[source] == BACKWARD:
                    return source, first
    return None


def reads_recomputed(op: Op, roles: Roles) -> bool:
    """Whether `op`, if it reads a tensor that is computed again, takes the clone."""
    return roles.phase.get(op) == BACKWARD and op.type not in SIZES


def rewire_backward(
    graph: Graph,
    added: Mapping[Op, Sequence[Op]],
    instead: Mapping[Tensor, Tensor],
    roles: Roles,
) -> Graph:
    """Return a copy of `graph` whose backward pass reads other tensors in the place of some.

    Args:
        added: ops that it does not have yet, by the op that they are put before.
        instead: what is read, by what was.
    """
    copies = {o: clone_op(o, ()) for op in graph.ops for o in (*added.get(op, ()), op)}

    def copied(tensor: Tensor) -> Tensor:
        return copies[tensor.op].outputs[tensor.index]

    for op, copy in copies.items():
        again = reads_recomputed(op, roles)
        copy.inputs = [copied(instead.get(t, t) if again else t) for t in op.inputs]
        copy.control = [copies[c] for c in op.control if c in copies]
    return Graph(
        sort_topologically(list(copies.values())),
        [copied(t) for t in graph.inputs],
        [copied(t) for t in graph.outputs],
        [dataclasses.replace(v, handle=copied(v.handle)) for v in graph.variables],
        graph.functions,
        [copies[op] for op in graph.effects if op in copies],
    )
