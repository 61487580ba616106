"""Writing TensorFlow functions: IR ops as NodeDefs of a FunctionDef.

A program for many ranks is one FunctionDef, put together from bytes and handed
to the runtime once; no Python op objects are made. This is the only module that knows
how a FunctionDef spells its edges.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, node_def_pb2

from tfpar.ir.graph import DType, Op
from tfpar.tf.interop import runtime
from tfpar.tf.interop.attributes import write_attr
from tfpar.tf.interop.graphs import op_definition

_serial = itertools.count()


class FunctionWriter:
    """Collects nodes and arguments of one function, then registers it.

    Tensors are written as TensorFlow's function edges: an argument's name, or
    `node:output_arg:offset`.

    Args:
        bounded: every call of it lies in what a rank's beacon bounds in time (`World.at`), so that
            no op of it need do so.
    """

    def __init__(self, name: str, bounded: bool = False) -> None:
        self.bounded = bounded
        self.name = f"{name}_{next(_serial)}"
        self.definition = function_pb2.FunctionDef()
        self.definition.signature.name = self.name
        self._nodes: list[bytes] = []
        self._outputs: list[tf.DType] = []

    def argument(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int | None] | None = None,
        resource_dtype: str | None = None,
    ) -> str:
        """Add an argument; for a variable handle `shape` and `resource_dtype` describe it."""
        index = len(self.definition.signature.input_arg)
        arg = self.definition.signature.input_arg.add(name=name)
        arg.type = tf.dtypes.as_dtype(dtype).as_datatype_enum
        attrs = self.definition.arg_attr[index].attr
        if shape is not None:
            sizes = [-1 if n is None else n for n in shape]
            if resource_dtype is not None:
                handle = attrs["_handle_shapes"].list.shape.add()
                attrs["_handle_dtypes"].list.type.append(
                    tf.dtypes.as_dtype(resource_dtype).as_datatype_enum
                )
            else:
                handle = attrs["_output_shapes"].list.shape.add()
            for size in sizes:
                handle.dim.add().size = size
        return name

    def node(
        self,
        name: str,
        op_type: str,
        inputs: Sequence[str],
        attrs: bytes,
        device: str = "",
        control: Sequence[str] = (),
    ) -> None:
        """Add a node; `attrs` are serialised attributes from `serialize_attrs`."""
        node = node_def_pb2.NodeDef(name=name, op=op_type, device=device)
        node.input.extend(inputs)
        node.input.extend("^" + c for c in control)
        # Concatenated protobuf messages merge: attributes are serialised once for all ranks.
        self._nodes.append(node.SerializeToString() + attrs)

    def output(self, edge: str, dtype: str) -> None:
        """Return the tensor at `edge`."""
        name = f"out{len(self._outputs)}"
        arg = self.definition.signature.output_arg.add(name=name)
        arg.type = tf.dtypes.as_dtype(dtype).as_datatype_enum
        self.definition.ret[name] = edge
        self._outputs.append(tf.dtypes.as_dtype(dtype))

    def effect(self, node: str) -> None:
        """Make `node` run although nothing returned depends on it."""
        key = f"effect{len(self.definition.control_ret)}"
        self.definition.control_ret[key] = node
        self.definition.signature.control_output.append(key)

    def register(
        self,
        stateful: bool = True,
        bodies: Sequence[RegisteredFunction] = (),
        inline: bool = True,
    ) -> RegisteredFunction:
        """Hand the function to the runtime.

        Args:
            bodies: the functions that it calls, which it keeps.
            inline: whether TensorFlow may put a copy of it in the place of each call.
        """
        self.definition.signature.is_stateful = stateful
        if not inline:
            self.definition.attr["_noinline"].b = True
            # Nor make one for each call, as Grappler does: tasks are called for each microbatch.
            self.definition.attr["_nospecialize"].b = True
        head = self.definition.SerializeToString()
        body = b"".join(_length_delimited(_NODE_DEF_FIELD, n) for n in self._nodes)
        definition = function_pb2.FunctionDef.FromString(head + body)
        runtime.add_function(definition)
        return RegisteredFunction(self.name, self._outputs, bodies)


class RegisteredFunction:
    """A function known to the runtime; removed from it with its last reference."""

    def __init__(
        self, name: str, outputs: Sequence[tf.DType], bodies: Sequence[RegisteredFunction] = ()
    ) -> None:
        self.name = name
        self.outputs = list(outputs)
        self._bodies = list(bodies)

    def __call__(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run on flat inputs (tensors and variable handles).

        In a graph it becomes an op that calls it; whoever holds the graph keeps this object too.
        """
        if not tf.executing_eagerly():
            return self._called_in_graph(inputs)
        return runtime.call_function(self.name, inputs, len(self.outputs))

    def _called_in_graph(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        called, given, made = (attr_value_pb2.AttrValue() for _ in range(3))
        called.func.name = self.name
        given.list.type.extend(t.dtype.as_datatype_enum for t in inputs)
        made.list.type.extend(dtype.as_datatype_enum for dtype in self.outputs)
        # Collectives meet by names, which neither scopes nor serial numbers may change.
        with tf.compat.v1.name_scope(""):
            op = tf.compat.v1.get_default_graph().create_op(
                "StatefulPartitionedCall",
                list(inputs),
                self.outputs,
                attrs={"f": called, "Tin": given, "Tout": made},
                name=self.name.rpartition("_")[0],
            )
        return list(op.outputs)

    @property
    def definition(self) -> Any:
        """The FunctionDef that the runtime holds."""
        return runtime.function_definition(self.name)

    def __del__(self) -> None:
        try:
            runtime.remove_function(self.name)
        except Exception:  # noqa: BLE001 - the runtime may be gone at interpreter exit
            pass


_NODE_DEF_FIELD = 3  # FunctionDef.node_def


def _length_delimited(field: int, payload: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def serialize_attrs(attrs: Mapping[str, Any]) -> bytes:
    """Attributes as the bytes that they are in a NodeDef."""
    node = node_def_pb2.NodeDef()
    for key, value in attrs.items():
        if value is not None:
            node.attr[key].CopyFrom(
                value if isinstance(value, attr_value_pb2.AttrValue) else write_attr(value)
            )
    return node.SerializeToString()


def const_attrs(value: Any, dtype: str) -> bytes:
    """Attributes of a Const."""
    proto = tf.make_tensor_proto(value, dtype=tf.dtypes.as_dtype(dtype))
    out = attr_value_pb2.AttrValue()
    out.tensor.CopyFrom(proto)
    return serialize_attrs({"value": out, "dtype": DType(dtype)})


def output_edges(op: Op) -> list[str]:
    """The `output_arg:offset` suffix of each output of a TensorFlow op."""
    suffixes = []
    for arg, count in _output_args(op):
        suffixes += [f"{arg}:{i}" for i in range(count)]
    return suffixes


def _output_args(op: Op) -> list[tuple[str, int]]:
    definition = op_definition(op.type)
    out = []
    for arg in definition.output_arg:
        if arg.number_attr:
            out.append((arg.name, int(op.attrs[arg.number_attr])))
        elif arg.type_list_attr:
            out.append((arg.name, len(op.attrs[arg.type_list_attr])))
        else:
            out.append((arg.name, 1))
    return out
