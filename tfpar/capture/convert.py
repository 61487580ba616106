"""A traced FuncGraph as an `ir.Graph`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tfpar.capture.attributes import read_attr
from tfpar.ir.graph import FunctionRef, Graph, Op, Shape, Tensor
from tfpar.ir.order import sort_topologically
from tfpar.ir.passes.hoist_reads import hoist_reads
from tfpar.ir.passes.inline_calls import inline_calls

_DROPPED_ATTRS = frozenset({"_output_shapes", "_class", "_user_specified_name"})
_WHILE_TYPES = ("While", "StatelessWhile")


def static_shape(shape: tf.TensorShape) -> Shape:
    return None if shape.rank is None else tuple(shape.as_list())


def convert_func_graph(func_graph) -> Graph:
    """The IR of a FuncGraph: its ops, inputs and outputs, calls inlined.

    Resource placeholders become graph inputs like any other; `capture` binds those
    that are variables. The function bodies that ops name are in `Graph.functions`.
    """
    graph = _convert(func_graph, {})
    inline_calls(graph)
    hoist_reads(graph)
    return graph


def _convert(func_graph, functions: dict[str, Graph]) -> Graph:
    graph_def = func_graph.as_graph_def()
    graph = Graph(functions=functions)
    by_name: dict[str, Op] = {}
    pairs = list(zip(func_graph.get_operations(), graph_def.node, strict=True))
    for tf_op, node in pairs:
        attrs = {k: read_attr(v) for k, v in node.attr.items() if k not in _DROPPED_ATTRS}
        op = Op(node.name, node.op, attrs=attrs, stateful=tf_op.op_def.is_stateful)
        for tensor in tf_op.outputs:
            op.add_output(_shape_of(tensor), tensor.dtype.base_dtype.name)
        by_name[op.name] = op
    # Gradients of loops add inputs to loops that exist already: edges come second.
    for _, node in pairs:
        op = by_name[node.name]
        for name in node.input:
            source, _, index = name.partition(":")
            if name.startswith("^"):
                op.control.append(by_name[name[1:]])
            else:
                op.inputs.append(by_name[source].outputs[int(index or 0)])
    graph.ops = sort_topologically(list(by_name.values()))
    graph.inputs = [_tensor(by_name, t) for t in func_graph.inputs]
    graph.outputs = [_tensor(by_name, t) for t in func_graph.outputs]
    graph.effects = [by_name[o.name] for o in func_graph.control_outputs]
    for op in graph.ops:
        _complete_variants(op)
        _convert_bodies(func_graph, op, functions)
    return graph


def _tensor(by_name: dict[str, Op], tensor: tf.Tensor) -> Tensor:
    return by_name[tensor.op.name].outputs[tensor.value_index]


def _shape_of(tensor: tf.Tensor) -> Shape:
    """A variable's shape for its handle; `(length, *element)` for a tensor list."""
    if tensor.dtype.base_dtype not in (tf.resource, tf.variant):
        return static_shape(tensor.shape)
    data = handle_data_util.get_resource_handle_data(tensor)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None if tensor.dtype == tf.variant else static_shape(tensor.shape)
    held = static_shape(tf.TensorShape(data.shape_and_type[0].shape))
    if tensor.dtype == tf.variant:
        return None if held is None else (None, *held)
    return held


def _complete_variants(op: Op) -> None:
    """Lengths of new lists, and what an op that passes a list on knows from its input."""
    length: Any = None
    if op.type == "TensorListReserve":
        length = _const(op.inputs[1])
    elif op.type == "EmptyTensorList":
        length = _const(op.inputs[1])  # at most so many
    elif op.type in ("TensorListFromTensor", "OptionalFromValue"):
        length = 1 if op.type == "OptionalFromValue" else (op.inputs[0].shape or (None,))[0]
    sources = [t for t in op.inputs if t.dtype == "variant"]
    for tensor in op.outputs:
        if tensor.dtype != "variant":
            continue
        if tensor.shape is not None and length is not None and length >= 0:
            tensor.shape = (int(length), *tensor.shape[1:])
        elif len(sources) == 1 and sources[0].shape is not None and not _names_functions(op):
            tensor.shape = sources[0].shape


def _const(tensor: Tensor) -> Any:
    return tensor.op.attrs["value"] if tensor.op.type == "Const" else None


def _names_functions(op: Op) -> bool:
    return any(True for _ in _function_refs(op))


def _function_refs(op: Op) -> Iterator[tuple[str, int | None, FunctionRef]]:
    """(attribute, position in it if it is a list, name) of each function that `op` names."""
    for key, value in op.attrs.items():
        if isinstance(value, FunctionRef) and value:
            yield key, None, value
        elif isinstance(value, list):
            for position, item in enumerate(value):
                if isinstance(item, FunctionRef) and item:
                    yield key, position, item


def _convert_bodies(func_graph, op: Op, functions: dict[str, Graph]) -> None:
    """Convert the functions that `op` names, each into a body of its own.

    Lists and handles have the shapes by which the caller knows them.
    """
    skip = 1 if op.type in ("If", "StatelessIf", "Case", "StatelessCase") else 0
    for key, position, name in list(_function_refs(op)):
        body_graph = _find_function(func_graph, name)
        if body_graph is None:
            continue
        ref = _fresh_name(name, functions)
        functions[ref] = Graph(functions=functions)  # keeps the name
        body = _convert(body_graph, functions)
        functions[ref] = body
        if position is None:
            op.attrs[key] = ref
        else:
            op.attrs[key][position] = ref
        for inner, outer in zip(body.inputs, op.inputs[skip:], strict=False):
            if inner.dtype in ("resource", "variant") and not inner.is_static:
                inner.shape = outer.shape
        for inner, outer in zip(body.outputs, op.outputs, strict=False):
            if outer.dtype in ("resource", "variant") and outer.shape is None:
                outer.shape = inner.shape
    if op.type in _WHILE_TYPES:
        for before, after in zip(op.inputs, op.outputs, strict=True):
            if after.dtype == "variant":
                after.shape = before.shape


def _fresh_name(name: str, functions: dict[str, Graph]) -> FunctionRef:
    candidate, count = name, 1
    while candidate in functions:
        count += 1
        candidate = f"{name}#{count}"
    return FunctionRef(candidate)


def _find_function(func_graph, name: str):
    """The FuncGraph of function `name`, sought outwards."""
    while func_graph is not None:
        function = func_graph._get_function(name)
        if function is not None:
            return function.graph
        func_graph = getattr(func_graph, "outer_graph", None)
    return None
