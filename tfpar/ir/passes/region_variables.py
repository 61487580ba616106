"""Variables that regions are given: reads of them are hoisted, handles that go unused are dropped.

A variable that a region only reads is read before it. Loops, branches and calls then take the
value, which may be resharded on its way in as any other; a handle could not be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from tfpar.ir.graph import DType, Graph, Op, ShapeAttr, Tensor, walk_functions
from tfpar.ir.traits import LOOPS, REGIONS, UNCHANGED, VARIABLE_READS, body_offset, origin


def hoist_reads(graph: Graph) -> Graph:
    """Hoist the reads of every region of `graph`, innermost first, in place; returns `graph`."""
    ops: list[Op] = []
    passed_on: dict[Tensor, Tensor] = {}
    for op in graph.ops:
        op.inputs = [passed_on.get(t, t) for t in op.inputs]
        if op.type in REGIONS:
            bodies = [body for _, body in walk_functions(graph, op)]
            for body in bodies:
                hoist_reads(body)
            if bodies:
                passed_on.update(_handed_through(op, bodies))
                ops += _hoist_from(op, bodies)
        ops.append(op)
    graph.ops = ops
    graph.outputs = [passed_on.get(t, t) for t in graph.outputs]
    return graph


def is_unchanged(body: Graph, position: int) -> bool:
    """Whether a loop passes its input at `position` on as it came."""
    return origin(body.outputs[position], UNCHANGED) is body.inputs[position]


def _handed_through(op: Op, bodies: list[Graph]) -> dict[Tensor, Tensor]:
    """Outputs of `op` that are inputs of it: whoever reads them may read those."""
    if op.type in LOOPS:
        body = next(b for b in bodies if len(b.outputs) == len(op.outputs))
        return {
            after: before
            for i, (before, after) in enumerate(zip(op.inputs, op.outputs, strict=True))
            if is_unchanged(body, i)
        }
    if len(bodies) == 1:
        outer = dict(zip(bodies[0].inputs, op.inputs, strict=True))
        returned = zip(bodies[0].outputs, op.outputs, strict=True)
        return {made: outer[inner] for inner, made in returned if inner in outer}
    return {}


def _hoist_from(op: Op, bodies: list[Graph]) -> list[Op]:
    """Turn the handles that `op` only reads into values; returns the reads to run before it."""
    offset = body_offset(op.type)
    written = {
        tensor
        for i, tensor in enumerate(op.inputs)
        if tensor.dtype == "resource" and not _only_read(i - offset, op, bodies)
    }
    reads: dict[Tensor, Op] = {}
    for i, handle in enumerate(op.inputs):
        if handle.dtype != "resource" or handle in written or handle.shape is None:
            continue
        dtype = next((d for b in bodies if (d := _read_dtype(b, b.inputs[i - offset]))), None)
        if dtype is None:
            continue
        if handle not in reads:
            read = Op(
                f"{op.name}/hoisted_{i}",
                "ReadVariableOp",
                [handle],
                {"dtype": DType(dtype)},
                op.control,
                stateful=True,
            )
            read.add_output(handle.shape, dtype)
            reads[handle] = read
        value = reads[handle].outputs[0]
        op.inputs[i] = value
        for body in bodies:
            _pass_value(body, body.inputs[i - offset], value)
        if op.type in LOOPS:
            op.outputs[i].dtype, op.outputs[i].shape = value.dtype, value.shape
            if op.attrs.get("output_shapes"):
                op.attrs["output_shapes"][i] = ShapeAttr(value.shape)
        op.attrs["T" if op.type in LOOPS else "Tin"][i - offset] = DType(value.dtype)
    if "_read_only_resource_inputs" in op.attrs:
        op.attrs["_read_only_resource_inputs"] = [
            i for i in op.attrs["_read_only_resource_inputs"] if op.inputs[i].dtype == "resource"
        ]
    return list(reads.values())


def _only_read(position: int, op: Op, bodies: list[Graph]) -> bool:
    if position < 0:
        return False
    is_loop = op.type in LOOPS
    for body in bodies:
        handle = body.inputs[position]
        for user in body.ops:
            if handle in user.inputs and user.type not in VARIABLE_READS:
                return False
        for at, tensor in enumerate(body.outputs):
            if tensor is handle and not (is_loop and at == position):
                return False
        is_body = is_loop and len(body.outputs) == len(op.outputs)
        if is_body and body.outputs[position] is not handle:
            return False
    return True


def _read_dtype(body: Graph, handle: Tensor) -> str | None:
    for user in body.ops:
        if (
            user.type in VARIABLE_READS
            and user.type != "VariableShape"
            and user.inputs[0] is handle
        ):
            return user.outputs[0].dtype
    return None


def _pass_value(body: Graph, handle: Tensor, value: Tensor) -> None:
    """Make the body's argument `handle` the variable's value."""
    handle.dtype, handle.shape = value.dtype, value.shape
    source = handle.op
    source.attrs["dtype"] = DType(value.dtype)
    source.attrs["shape"] = ShapeAttr(value.shape)
    gone: set[Op] = set()
    replaced: dict[Tensor, Tensor] = {}
    ops: list[Op] = []
    for user in body.ops:
        if handle in user.inputs and user.type in VARIABLE_READS:
            if user.type == "ReadVariableOp":
                replaced[user.outputs[0]] = handle
                gone.add(user)
                continue
            ops += _read_value(user, value)
        ops.append(user)
    body.ops = ops
    for user in body.ops:
        user.inputs = [replaced.get(t, t) for t in user.inputs]
        user.control = _without(gone, user.control)
    body.outputs = [replaced.get(t, t) for t in body.outputs]
    body.effects = [e for e in body.effects if e not in gone]


def _without(gone: set[Op], control: Iterable[Op]) -> list[Op]:
    """`control` with what ops that are `gone` waited for in their place."""
    kept: dict[Op, None] = {}
    todo = list(control)[::-1]
    while todo:
        op = todo.pop()
        if op in gone:
            todo += op.control[::-1]
        else:
            kept[op] = None
    return list(kept)


def _read_value(user: Op, value: Tensor) -> list[Op]:
    """Make `user`, which reads a variable by its handle, read its value; the ops it needs."""
    user.stateful = False
    if user.type == "VariableShape":
        dtype = user.outputs[0].dtype
        user.type, user.inputs = "Const", []
        user.attrs = {"value": np.array(value.shape, dtype), "dtype": DType(dtype)}
        return []
    indices = DType(user.inputs[1].dtype)
    if user.type == "ResourceGatherNd":
        user.type = "GatherNd"
        user.attrs = {"Tparams": DType(value.dtype), "Tindices": indices}
        return []
    axis = user.attrs.get("batch_dims", 0)
    const = Op(
        f"{user.name}/axis",
        "Const",
        (),
        {"value": np.array(axis, np.int32), "dtype": DType("int32")},
    )
    user.inputs.append(const.add_output((), "int32"))
    user.type = "GatherV2"
    user.attrs = {
        "Tparams": DType(value.dtype),
        "Tindices": indices,
        "Taxis": DType("int32"),
        "batch_dims": axis,
    }
    return [const]


# --- unused handles -------------------------------------------------------------------------
# Functions that were traced while variables were split give shards to their loops and branches, in
# which only the variables themselves are left (`tf.interop.variables`).

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
