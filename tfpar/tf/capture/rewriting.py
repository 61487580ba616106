"""Changing and adding nodes of GraphDefs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2, tensor_pb2

from tfpar.tf.capture.graph_def import set_inputs, unique_name


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
