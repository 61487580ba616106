"""A traced FuncGraph as an `ir.Graph`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfpar.ir.graph import DType, FunctionRef, Graph, Op, Shape, Tensor
from tfpar.ir.order import sort_topologically
from tfpar.ir.passes.infer_lists import infer_lists
from tfpar.ir.passes.inline_calls import inline_calls
from tfpar.ir.passes.order_effects import order_effects
from tfpar.ir.passes.region_variables import drop_unused_handles, hoist_reads
from tfpar.ir.traits import LOOPS, body_offset
from tfpar.tf.interop.attributes import read_attr
from tfpar.tf.interop.graphs import find_op_definition, graph_of_function
from tfpar.tf.interop.variables import CALL, plain_op

_DROPPED_ATTRS = frozenset({"_output_shapes", "_class", "_user_specified_name"})


def static_shape(shape: tf.TensorShape) -> Shape:
    return None if shape.rank is None else tuple(shape.as_list())


def convert_func_graph(func_graph, more_outputs: Sequence[tf.Tensor] = ()) -> Graph:
    """The IR of a FuncGraph: its ops, inputs and outputs; effects ordered, calls inlined.

    Resource placeholders become graph inputs like any other; `capture` binds those
    that are variables. The function bodies that ops name are in `Graph.functions`.

    Args:
        more_outputs: tensors of the FuncGraph that the graph has as outputs after its own.
    """
    graph = _convert(func_graph, {}, more_outputs)
    infer_lists(graph)
    order_effects(graph)
    inline_calls(graph)
    hoist_reads(graph)
    drop_unused_handles(graph)
    return graph


def _convert(
    func_graph, functions: dict[str, Graph], more_outputs: Sequence[tf.Tensor] = ()
) -> Graph:
    graph_def = func_graph.as_graph_def()
    graph = Graph(functions=functions)
    by_name: dict[str, Op] = {}
    num_inputs: dict[str, int] = {}  # of calls that take more than what they stand for
    pairs = list(zip(func_graph.get_operations(), graph_def.node, strict=True))
    for tf_op, node in pairs:
        attrs = {k: read_attr(v) for k, v in node.attr.items() if k not in _DROPPED_ATTRS}
        op_type = node.op
        if find_op_definition(op_type) is None:  # a function by its name, as Defun calls it
            attrs |= {
                "f": FunctionRef(op_type),
                "Tin": [DType(t.dtype.base_dtype.name) for t in tf_op.inputs],
                "Tout": [DType(t.dtype.base_dtype.name) for t in tf_op.outputs],
            }
            op_type = "StatefulPartitionedCall"
        plain = _plain_form(tf_op)
        if plain is not None:
            op_type, num_inputs[node.name], dtype = plain
            attrs = {"dtype": dtype}
        op = Op(node.name, op_type, attrs=attrs, stateful=tf_op.op_def.is_stateful)
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
        del op.inputs[num_inputs.get(op.name, len(op.inputs)) :]
    graph.ops = sort_topologically(list(by_name.values()))
    graph.inputs = [_tensor(by_name, t) for t in func_graph.inputs]
    graph.outputs = [_tensor(by_name, t) for t in (*func_graph.outputs, *more_outputs)]
    graph.effects = [by_name[o.name] for o in func_graph.control_outputs]
    for op in graph.ops:
        _convert_bodies(func_graph, op, functions)
    return graph


def _plain_form(op: tf.Operation) -> tuple[str, int, DType] | None:
    """The read or write of a split variable that a call stands for: see `plain_op`."""
    if op.type != CALL:
        return None
    dtypes = [DType(t.dtype.base_dtype.name) for t in (*op.inputs, *op.outputs)]
    return plain_op(op.get_attr("f").name, dtypes)


def _tensor(by_name: dict[str, Op], tensor: tf.Tensor) -> Tensor:
    return by_name[tensor.op.name].outputs[tensor.value_index]


def _shape_of(tensor: tf.Tensor) -> Shape:
    """A variable's shape for its handle; `(length, *element)` for a tensor list."""
    if tensor.dtype.base_dtype not in (tf.resource, tf.variant):
        return static_shape(tensor.shape)
    data = tf.__internal__.ops.get_resource_handle_data(tensor)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None if tensor.dtype == tf.variant else static_shape(tensor.shape)
    if data.shape_and_type[0].dtype == tf.variant.as_datatype_enum:
        return None
    held = static_shape(tf.TensorShape(data.shape_and_type[0].shape))
    if tensor.dtype == tf.variant:
        return None if held is None else (None, *held)
    return held


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
    offset = body_offset(op.type)
    for key, position, name in list(_function_refs(op)):
        known = op.outputs if op.type in LOOPS else op.inputs[offset:]
        body_graph = _find_function(func_graph, name, known)
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
        for inner, outer in zip(body.inputs, op.inputs[offset:], strict=False):
            if inner.dtype == "resource":  # one that the body does not use says nothing of itself
                inner.shape = outer.shape


def _fresh_name(name: str, functions: dict[str, Graph]) -> FunctionRef:
    candidate, count = name, 1
    while candidate in functions:
        count += 1
        candidate = f"{name}#{count}"
    return FunctionRef(candidate)


def _find_function(func_graph, name: str, arguments: Sequence[Tensor]):
    """The FuncGraph of function `name`, sought outwards.

    A function of an imported graph has none; it gets one with the shapes of `arguments`.
    """
    outer = func_graph
    while outer is not None:
        function = outer._get_function(name)
        if function is not None:
            if hasattr(function, "graph"):
                return function.graph
            shapes = [
                tf.TensorShape([] if t.dtype in ("resource", "variant") else t.shape)
                for t in arguments
            ]
            with outer.as_default():
                return graph_of_function(function.definition, shapes)
        outer = getattr(outer, "outer_graph", None)
    return None
