"""Handles that a region is given and does not use: it does without them.

Functions that were traced while variables were split give shards to their loops and branches, in
which only the variables themselves are left (`tf.interop.variable_calls`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tfpar.ir.graph import Graph, Op, Tensor, walk_functions
from tfpar.ir.traits import LOOPS, REGIONS, body_offset

_T = TypeVar("_T")


def drop_unused_handles(graph: Graph) -> Graph:
    """Drop them from every region of `graph`, innermost first, in place; returns `graph`."""
    used = {*graph.outputs, *(tensor for op in graph.ops for tensor in op.inputs)}
    for op in graph.ops:
        if op.type in REGIONS:
            bodies = list(walk_functions(graph, op))
            for _, body in bodies:
                drop_unused_handles(body)
            if bodies:
                _drop(op, bodies, used)
    return graph


def _drop(op: Op, bodies: Sequence[tuple[str, Graph]], used: set[Tensor]) -> None:
    """Drop those of `op`.

    Args:
        bodies: by the attribute that names each.
        used: what is used around `op`.
    """
    offset, is_loop = body_offset(op.type), op.type in LOOPS
    kept = set(range(len(op.inputs)))
    for i, tensor in enumerate(op.inputs):
        if tensor.dtype != "resource" or i < offset or (is_loop and op.outputs[i] in used):
            continue
        if not any(_uses(body, i - offset, key == "body") for key, body in bodies):
            kept.remove(i)
    if len(kept) == len(op.inputs):
        return

    def left(entries: Sequence[_T], shift: int = 0) -> list[_T]:
        return [entry for i, entry in enumerate(entries) if i + shift in kept]

    read_only = "_read_only_resource_inputs"
    if read_only in op.attrs:
        now = {before: after for after, before in enumerate(sorted(kept))}
        op.attrs[read_only] = [now[i] for i in op.attrs[read_only] if i in kept]
    types = "T" if is_loop else "Tin"
    op.attrs[types] = left(op.attrs[types], offset)
    op.inputs = left(op.inputs)
    if is_loop:
        op.outputs = left(op.outputs)
        for index, tensor in enumerate(op.outputs):
            tensor.index = index
        if op.attrs.get("output_shapes"):
            op.attrs["output_shapes"] = left(op.attrs["output_shapes"])
    for key, body in bodies:
        if is_loop and key == "body":
            body.outputs = left(body.outputs)
        before, body.inputs = body.inputs, left(body.inputs, offset)
        gone = {tensor.op for tensor in before}.difference(tensor.op for tensor in body.inputs)
        body.ops = [inner for inner in body.ops if inner not in gone]


def _uses(body: Graph, position: int, is_round: bool) -> bool:
    """Whether `body` uses its input; a round of a loop may hand it on to the next."""
    handle = body.inputs[position]
    returned = [i for i, tensor in enumerate(body.outputs) if tensor is handle]
    handed_on = returned == ([position] if is_round else [])
    return not handed_on or any(handle in op.inputs or handle.op in op.control for op in body.ops)
