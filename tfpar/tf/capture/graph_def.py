"""Rewriting GraphDefs before they are read: static feeds, inlined calls, nodes that are changed.

Shapes are inferred when a GraphDef is imported. So whatever should have static shapes
must stand in the graph itself, not behind a call, and feeds must state their shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2, tensor_pb2

from tfpar.ir.traits import CALLS
from tfpar.spec import CaptureError
from tfpar.tf.interop.graphs import nodes_of_function

_MAX_CALL_DEPTH = 64


def split_name(name: str) -> tuple[str, int]:
    """(op name, output index) of `scope/op` or `scope/op:1`."""
    op, _, index = name.partition(":")
    return op, int(index or 0)


def unique_name(name: str, taken: set[str]) -> str:
    """`name`, or with a number behind it where it is taken; it is taken then."""
    found, count = name, 1
    while found in taken:
        found, count = f"{name}_{count}", count + 1
    taken.add(found)
    return found


def import_graph(graph_def: graph_pb2.GraphDef) -> tf.__internal__.FuncGraph:
    """The graph of `graph_def`, with shapes inferred afresh."""
    graph = tf.__internal__.FuncGraph("graph")
    with graph.as_default():
        tf.import_graph_def(graph_def, name="")
    return graph


def with_static_feeds(
    graph_def: graph_pb2.GraphDef, feeds: Mapping[str, tuple[tf.DType, Sequence[int]]]
) -> graph_pb2.GraphDef:
    """A copy in which each fed op (by name) is a Placeholder of the given dtype and shape."""
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    for node in result.node:
        if node.name in feeds:
            dtype, shape = feeds[node.name]
            set_placeholder(node, dtype, shape)
    return result


def find_ancestors(graph_def: graph_pb2.GraphDef, names: Iterable[str]) -> graph_pb2.GraphDef:
    """The nodes of these names and all that they wait for, wherever they were to be placed."""
    nodes = {node.name: node for node in graph_def.node}
    needed: set[str] = set()
    stack = list(names)
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            stack += [split_name(i.removeprefix("^"))[0] for i in nodes[name].input]
    kept = graph_pb2.GraphDef(versions=graph_def.versions, library=graph_def.library)
    kept.node.extend(node for node in graph_def.node if node.name in needed)
    for node in kept.node:
        node.attr.pop("_class", None)  # beside an op that may be gone
    return kept


def set_placeholder(
    node: node_def_pb2.NodeDef, dtype: tf.DType, shape: Sequence[int | None] | None
) -> None:
    """Turn `node` into a Placeholder."""
    node.op = "Placeholder"
    del node.input[:]
    node.attr.clear()
    node.attr["dtype"].type = dtype.base_dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())


def set_variable_handle(node: node_def_pb2.NodeDef, dtype: tf.DType, shape: tf.TensorShape) -> None:
    """Turn `node` into the VarHandleOp of a variable."""
    node.op = "VarHandleOp"
    del node.input[:]
    node.attr.clear()
    node.attr["dtype"].type = dtype.base_dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(shape.as_proto())


class InlinedGraph:
    """A GraphDef with the bodies of called functions in place of the calls, nested ones too.

    Attributes:
        graph_def: the graph without calls.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self._library = {f.signature.name: f for f in graph_def.library.function}
        self._data: dict[str, str] = {}  # "call:1" -> the tensor that takes its place
        self._control: dict[str, list[str]] = {}  # "call" -> the ops to wait for
        self.graph_def = graph_def
        for _ in range(_MAX_CALL_DEPTH):
            if not any(map(_is_call, self.graph_def.node)):
                return
            self.graph_def = self._inline_once()
        raise CaptureError(
            f"Functions call each other more than {_MAX_CALL_DEPTH} deep; recursive tf.functions "
            f"cannot be captured."
        )

    def tensor(self, name: str) -> str:
        """The tensor that holds what `name` held before."""
        op, index = split_name(name)
        name = f"{op}:{index}"
        while name in self._data:
            name = self._data[name]
        return name

    def operations(self, name: str) -> list[str]:
        """The ops that have run when operation `name` would have."""
        names = [name]
        while any(n in self._control for n in names):
            names = [m for n in names for m in self._control.get(n, [n])]
        return list(dict.fromkeys(names))

    def _inline_once(self) -> graph_pb2.GraphDef:
        source = self.graph_def
        result = graph_pb2.GraphDef(versions=source.versions, library=source.library)
        nodes: list[node_def_pb2.NodeDef] = []
        for node in source.node:
            nodes += self._body(node) if _is_call(node) else [_copy(node)]
        for node in nodes:
            data, waits = split_inputs(node)
            inputs = [self.tensor(i).removesuffix(":0") for i in data]
            waits = list(dict.fromkeys(op for w in waits for op in self.operations(w)))
            set_inputs(node, inputs, waits)
        result.node.extend(nodes)
        return result

    def _body(self, call: node_def_pb2.NodeDef) -> Iterator[node_def_pb2.NodeDef]:
        """The nodes that take the place of `call`; records where its results are."""
        callee, scope = call.attr["f"].func.name, call.name
        if callee not in self._library:
            raise CaptureError(f"{call.op} {call.name!r} calls {callee!r}, which the graph lacks.")
        function = self._library[callee]
        body, flat_name = nodes_of_function(function)
        arguments, waits = split_inputs(call)
        for parameter, argument in zip(function.signature.input_arg, arguments, strict=True):
            op, index = split_name(argument)
            self._data[f"{scope}/{parameter.name}:0"] = f"{op}:{index}"
            self._control[f"{scope}/{parameter.name}"] = [op]
        for node in body.node:
            if f"{scope}/{node.name}:0" not in self._data:
                data, after = split_inputs(node)
                inputs = [f"{scope}/{i}" for i in data]
                set_inputs(node, inputs, [*(f"{scope}/{a}" for a in after), *waits])
                node.name = f"{scope}/{node.name}"
                yield node
        # Whoever uses a result runs the call, and so all its effects.
        effects = [f"{scope}/{name}" for name in function.control_ret.values()]
        self._control[scope] = [*effects, *waits]
        for position, (result, dtype) in enumerate(
            zip(function.signature.output_arg, call.attr["Tout"].list.type, strict=True)
        ):
            node = node_def_pb2.NodeDef(name=f"{scope}/result_{position}", op="Identity")
            node.attr["T"].type = dtype
            set_inputs(node, [f"{scope}/{flat_name[function.ret[result.name]]}"], effects)
            self._data[f"{scope}:{position}"] = f"{node.name}:0"
            self._control[scope].append(node.name)
            yield node


def _is_call(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node is a call to inline: calls that XLA must compile stay, for want of kernels."""
    return node.op in CALLS and not node.attr["_XlaMustCompile"].b


def _copy(node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    copy = node_def_pb2.NodeDef()
    copy.CopyFrom(node)
    return copy


def split_inputs(node: node_def_pb2.NodeDef) -> tuple[list[str], list[str]]:
    """Split the inputs of a node into data inputs and the names of its control ops."""
    data = [i for i in node.input if not i.startswith("^")]
    return data, [i[1:] for i in node.input if i.startswith("^")]


def set_inputs(node: node_def_pb2.NodeDef, data: Sequence[str], waits: Sequence[str]) -> None:
    del node.input[:]
    node.input.extend([*data, *(f"^{w}" for w in waits)])


# --- nodes ----------------------------------------------------------------------------------


class GraphCopy:
    """A copy of a graph, to be rewritten.

    Attributes:
        graph_def: the copy.
        nodes: its nodes, by name.
    """

    def __init__(self, source: graph_pb2.GraphDef) -> None:
        self.graph_def = graph_pb2.GraphDef()
        self.graph_def.CopyFrom(source)
        self.nodes = {node.name: node for node in self.graph_def.node}
        self._names = set(self.nodes)

    def add(
        self, name: str, op: str, data: Sequence[str], waits: Sequence[str] = (), **attrs: Any
    ) -> str:
        """Add a node, its attributes as `become` takes them; returns its name."""
        node = self.graph_def.node.add(name=unique_name(name, self._names))
        self.nodes[node.name] = become(node, op, data, waits, **attrs)
        return node.name

    def add_shape(self, name: str, shape: tf.TensorShape, after: Sequence[str]) -> str:
        """Add `shape` as the constant that list ops take, in the frame of the ops `after`."""
        known = -1 if shape.rank is None else [-1 if d is None else d for d in shape.as_list()]
        value = tf.make_tensor_proto(known, tf.int32)
        return self.add(f"{name}/element_shape", "Const", [], after, dtype=tf.int32, value=value)


def become(
    node: node_def_pb2.NodeDef, op: str, data: Sequence[str], waits: Sequence[str], **attrs: Any
) -> node_def_pb2.NodeDef:
    """Turn `node` into another op with these inputs and attributes only; returns it.

    Args:
        attrs: dtypes, shapes, tensors, numbers, or attributes of other nodes.
    """
    values = {name: _attr(value) for name, value in attrs.items()}
    node.op = op
    node.attr.clear()
    for name, value in values.items():
        node.attr[name].CopyFrom(value)
    set_inputs(node, data, waits)
    return node


def _attr(value: Any) -> attr_value_pb2.AttrValue:
    copy = attr_value_pb2.AttrValue()
    match value:
        case attr_value_pb2.AttrValue():
            copy.CopyFrom(value)
        case tf.DType():
            copy.type = value.as_datatype_enum
        case tf.TensorShape():
            copy.shape.CopyFrom(value.as_proto())
        case tensor_pb2.TensorProto():
            copy.tensor.CopyFrom(value)
        case bytes():
            copy.s = value
        case bool():
            copy.b = value
        case int():
            copy.i = value
        case _:
            raise TypeError(f"{value!r} is no attribute.")
    return copy
