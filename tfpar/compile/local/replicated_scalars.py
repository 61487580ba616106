"""Replicated scalars of a pipeline: variables of which every actor has a copy.

Every actor runs all assignments, so the copies stay equal. An actor receives the assigned value
unless it can compute it from its own tensors (a step counter plus one). Reading a copy needs no
communication, in the step or in a callback on one rank. Weights and variables that are not scalars
belong to one actor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tfpar.compile.local.local_graph import TASK, LocalProgram
from tfpar.compile.local.reshard import COLLECTIVE_TYPES, ONCE
from tfpar.ir.graph import FunctionRef, Op, Tensor
from tfpar.ir.traits import ASSIGNMENTS, CONSTANTS
from tfpar.pipeline.step_stages import can_be_sent

_READ = "ReadVariableOp"


def find_replicated_scalars(program: LocalProgram) -> dict[Tensor, list[Op]]:
    """Find the handles of the replicated scalars of a whole step, each with the ops that read or
    write it.

    They are no weights, and are read and assigned as a whole, between tasks.
    """
    readers = program.graph.consumers()
    found = {}
    for variable in program.graph.variables:
        touching = readers.get(variable.handle, [])
        if variable.shape == () and not variable.trainable:
            if all(_is_plain(op, variable.handle) for op in touching):
                found[variable.handle] = touching
    return found


def _is_plain(op: Op, handle: Tensor) -> bool:
    if op.type == _READ:
        return True
    return op.type in ASSIGNMENTS and all(t is handle or can_be_sent(t) for t in op.inputs)


def can_be_computed(tensor: Tensor, there: Collection[Tensor] | Mapping[Tensor, object]) -> bool:
    """Whether a scalar can be computed, by ops without effects, of constants and what is there.

    Args:
        there: tensors of the whole step that an actor has.
    """
    waiting, seen = [tensor], {tensor}
    while waiting:
        one = waiting.pop()
        if one in there or one.op.type in CONSTANTS:
            continue
        if not _computes_scalars(one.op):
            return False
        new = [t for t in one.op.inputs if t not in seen]
        seen.update(new)
        waiting += new
    return True


def _computes_scalars(op: Op) -> bool:
    apart = op.stateful or op.type == TASK or op.type in COLLECTIVE_TYPES or ONCE in op.attrs
    calls = any(isinstance(value, FunctionRef | list) for value in op.attrs.values())
    scalars = all(t.shape == () and can_be_sent(t) for t in (*op.inputs, *op.outputs))
    return bool(op.inputs) and scalars and not apart and not calls


def remove_dead_reads(
    ops: list[Op], kept: Collection[Tensor], read: Collection[Tensor]
) -> list[Op]:
    """Remove from `ops` the reads of `kept` variables that nobody asks for; others wait for what
    those did.

    Args:
        kept: handles.
        read: tensors that are asked for besides, such as results.
    """
    asked = {t for op in ops for t in op.inputs} | {*read}
    gone = {
        op for op in ops if op.type == _READ and op.inputs[0] in kept and op.outputs[0] not in asked
    }
    for op in ops:  # in order, so that what they wait for is settled before
        waits = (w for c in op.control for w in (c.control if c in gone else [c]))
        op.control = [*dict.fromkeys(waits)]
    return [op for op in ops if op not in gone]
