"""Inference of the shapes of tensor lists that TensorFlow does not state.

A list takes the element shape of what is put into it, and gives it to what is taken from it. A
region's lists are those of its bodies, and a loop's those that it comes back with. Lists that are
added up are as long as their sum. A list among the elements of a list counts as its elements, with
a length of 1 in front: lengths are never split.

Of lists that a loop makes TensorFlow computes the shape when the step runs, and hands the numbers
from the loop of the forward pass to that of the backward pass on stacks. Where the shape is known,
it is given to the list.
"""

from __future__ import annotations

import numpy as np

from tfpar.ir.graph import DType, Graph, Op, Shape, Tensor, walk_functions
from tfpar.ir.traits import ADDITIONS, LOOPS, NEW_LISTS, RESIZED_LISTS, UNCHANGED, body_offset

# Which input an op puts into the list that is its first; which output it takes from it.
_PUTS = {"TensorListSetItem": 2, "TensorListPushBack": 1}
_TAKES = {"TensorListGetItem": 0, "TensorListPopBack": 1, "OptionalGetValue": 0}

_MAX_ROUNDS = 8


def infer_lists(graph: Graph) -> Graph:
    """Complete the shapes of the lists of `graph` and its bodies, in place; returns `graph`."""
    for _ in range(_MAX_ROUNDS):
        if not _pass(graph):
            break
    for each in (graph, *graph.functions.values()):
        _tell_shapes(each)
    return graph


def _tell_shapes(graph: Graph) -> None:
    """Give the lists that a graph makes the shape that is known of them, as constants."""
    ops: list[Op] = []
    for op in graph.ops:
        shape = op.outputs[0].shape if op.type == "TensorListReserve" else None
        if shape is not None and None not in shape and op.attrs["element_dtype"] != "variant":
            values = [np.array(shape[1:], np.int32), np.array(shape[0], np.int32)]
            for position, (name, value) in enumerate(
                zip(("element", "length"), values, strict=True)
            ):
                if op.inputs[position].op.type != "Const":
                    ops.append(_constant(f"{op.name}/{name}", value, op.inputs[position].dtype))
                    op.inputs[position] = ops[-1].outputs[0]
        ops.append(op)
    graph.ops = ops


def _constant(name: str, value: np.ndarray, dtype: str) -> Op:
    const = Op(name, "Const", attrs={"value": value.astype(dtype), "dtype": DType(dtype)})
    const.add_output(value.shape, dtype)
    return const


def _pass(graph: Graph) -> bool:
    changed = False
    for op in graph.ops:
        bodies = [body for _, body in walk_functions(graph, op)]
        if bodies:
            changed |= _complete_region(op, bodies)
        elif any(t.dtype == "variant" for t in (*op.inputs, *op.outputs)):
            changed |= _complete(op)
    return changed


def _complete_region(op: Op, bodies: list[Graph]) -> bool:
    changed = False
    inputs = op.inputs[body_offset(op.type) :]
    for body in bodies:
        for inner, outer in zip(body.inputs, inputs, strict=True):
            changed |= _same(outer, inner)
        changed |= _pass(body)
        for inner, outer in zip(body.inputs, inputs, strict=True):
            changed |= _same(inner, outer)
        if len(body.outputs) == len(op.outputs):
            for inner, outer in zip(body.outputs, op.outputs, strict=True):
                changed |= _same(inner, outer)
    if op.type in LOOPS:
        for before, after in zip(op.inputs, op.outputs, strict=True):
            changed |= _same(before, after) | _same(after, before)
    return changed


def _same(known: Tensor, other: Tensor) -> bool:
    """Give the list `other`, which is the list `known`, its shape."""
    return known.dtype == "variant" and known.is_static and _set(other, known.shape)


def _set(tensor: Tensor, shape: Shape) -> bool:
    """Note the shape of a list; what is known stays, but for an unknown length."""
    if tensor.dtype != "variant" or shape is None or None in shape[1:]:
        return False
    if tensor.is_static:
        if tensor.shape[0] is not None or shape[0] is None:
            return False
        shape = (shape[0], *tensor.shape[1:])
    tensor.shape = tuple(shape)
    return True


def _complete(op: Op) -> bool:
    if op.type in NEW_LISTS and op.inputs:
        return _complete_new(op)
    if op.type in ("TensorListFromTensor", "OptionalFromValue"):
        element = _element_of(op.inputs[0])
        if op.type == "OptionalFromValue" and element is not None:
            element = (1, *element)
        return _set(op.outputs[0], element)
    held = next((t for t in op.inputs if t.dtype == "variant" and t.is_static), None)
    changed = _complete_operands(op)
    if op.type in _PUTS:
        element = _element_of(op.inputs[_PUTS[op.type]])
        if element is not None and not op.inputs[0].is_static:
            changed |= _set(op.inputs[0], ((op.inputs[0].shape or (None,))[0], *element))
        held = op.inputs[0]
    if held is None or not held.is_static:
        return changed
    for position, tensor in enumerate(op.outputs):
        if _TAKES.get(op.type) == position:
            changed |= _take(tensor, held)
        else:
            length = None if op.type in RESIZED_LISTS else held.shape[0]
            changed |= _set(tensor, (length, *held.shape[1:]))
    return changed


def _complete_operands(op: Op) -> bool:
    """Give the lists of which `op` makes one that is as long its length, if that is known."""
    operands = op.inputs if op.type in ADDITIONS else op.inputs[:1]
    if op.type not in ADDITIONS | _PUTS.keys() | UNCHANGED or op.outputs[0].dtype != "variant":
        return False
    length = (op.outputs[0].shape or (None,))[0]
    return any([t.is_static and _set(t, (length, *t.shape[1:])) for t in operands])


def _take(tensor: Tensor, held: Tensor) -> bool:
    """Give `tensor` the shape of an element of the list `held`."""
    if tensor.dtype == "variant":
        return _set(tensor, (None, *held.shape[2:]))
    if tensor.shape is not None:
        return False
    tensor.shape = tuple(held.shape[1:])
    return True


def _complete_new(op: Op) -> bool:
    tensor = op.outputs[0]
    length = _length(op.inputs[1])
    like = op.inputs[0].op
    if like.type == "TensorListElementShape" and like.inputs[0].is_static:
        return _set(tensor, (length, *like.inputs[0].shape[1:]))
    return tensor.is_static and _set(tensor, (length, *tensor.shape[1:]))


def _length(tensor: Tensor) -> int | None:
    """The length of a new list, as far as it is known; for an empty one, its bound."""
    if tensor.op.type == "Const":
        length = int(tensor.op.attrs["value"])
        return length if length >= 0 else None
    if tensor.op.type == "TensorListLength":
        known: int | None = (tensor.op.inputs[0].shape or (None,))[0]
        return known
    return None


def _element_of(tensor: Tensor) -> Shape:
    """The shape that `tensor` has as an element of a list; None if it is not known."""
    if not tensor.is_static:
        return None
    return (1, *tensor.shape[1:]) if tensor.dtype == "variant" else tensor.shape
