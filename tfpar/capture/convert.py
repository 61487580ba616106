"""A traced FuncGraph as an `ir.Graph`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph
from tensorflow.python.ops import handle_data_util

from tfpar.capture.attributes import read_attr
from tfpar.ir.graph import FunctionRef, Graph, Op, Shape, Tensor

_DROPPED_ATTRS = frozenset({"_output_shapes", "_class", "_user_specified_name"})


def static_shape(shape: tf.TensorShape) -> Shape:
    return None if shape.rank is None else tuple(shape.as_list())


def convert_func_graph(func_graph, functions: dict[str, Graph] | None = None) -> Graph:
    """The IR of a FuncGraph: its ops in creation order, inputs and outputs.

    Resource placeholders become graph inputs like any other; `capture` binds those
    that are variables. Function bodies are converted too and shared in
    `Graph.functions`.
    """
    graph_def = func_graph.as_graph_def()
    functions = {} if functions is None else functions
    library = {f.signature.name: f for f in graph_def.library.function}
    graph = Graph(functions=functions)
    by_name: dict[str, Op] = {}
    late_control: list[tuple[Op, list[str]]] = []
    for tf_op, node in zip(func_graph.get_operations(), graph_def.node, strict=True):
        op = _convert_op(tf_op, node, by_name)
        late_control.append((op, [n[1:] for n in node.input if n.startswith("^")]))
        by_name[op.name] = op
        graph.ops.append(op)
    for op, names in late_control:
        op.control = [by_name[n] for n in names]
    graph.inputs = [_tensor(by_name, t) for t in func_graph.inputs]
    graph.outputs = [_tensor(by_name, t) for t in func_graph.outputs]
    graph.effects = [by_name[o.name] for o in func_graph.control_outputs]
    _convert_functions(func_graph, graph, library)
    return graph


def _tensor(by_name: dict[str, Op], tensor: tf.Tensor) -> Tensor:
    return by_name[tensor.op.name].outputs[tensor.value_index]


def _convert_op(tf_op: tf.Operation, node, by_name: dict[str, Op]) -> Op:
    inputs = []
    for name in node.input:
        if name.startswith("^"):
            continue
        source, _, index = name.partition(":")
        inputs.append(by_name[source].outputs[int(index or 0)])
    attrs: dict[str, Any] = {
        k: read_attr(v) for k, v in node.attr.items() if k not in _DROPPED_ATTRS
    }
    op = Op(node.name, node.op, inputs, attrs, stateful=tf_op.op_def.is_stateful)
    for tensor in tf_op.outputs:
        dtype = tensor.dtype.base_dtype.name
        shape = static_shape(tensor.shape)
        if dtype in ("resource", "variant"):
            shape = _handle_shape(tensor, shape)
        op.add_output(shape, dtype)
    return op


def _handle_shape(tensor: tf.Tensor, shape: Shape) -> Shape:
    """A variable's shape for its handle; `(length, *element)` for a tensor list."""
    data = handle_data_util.get_resource_handle_data(tensor)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return shape
    held = static_shape(tf.TensorShape(data.shape_and_type[0].shape))
    if tensor.dtype == tf.variant:
        return None if held is None else (None, *held)
    return held


def _convert_functions(func_graph, graph: Graph, library: dict) -> None:
    """Bodies of the functions that ops name, with the input shapes of their callers."""
    for op in graph.ops:
        for value in list(op.attrs.values()):
            for ref in value if isinstance(value, list) else [value]:
                if isinstance(ref, FunctionRef) and ref not in graph.functions:
                    if ref in library:
                        graph.functions[ref] = Graph()  # breaks recursion
                        graph.functions[ref] = _convert_body(func_graph, library[ref], op, graph.functions)


def _convert_body(func_graph, fdef, op: Op, functions: dict[str, Graph]) -> Graph:
    with func_graph.as_default():
        body = function_def_to_graph.function_def_to_graph(fdef)
    return convert_func_graph(body, functions)
