"""Reference variables of TensorFlow 1 (`VariableV2`) as resource variables.

Both kinds hold the same values; a reference is handed on from op to op (an `Assign` gives the
variable that it assigned), and read by whoever takes a value. Here every reference becomes the
variable's handle, and every such reader gets a read that waits for what it waited for, its other
operands too: it looks at the variable when it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2, op_def_pb2

from tfpar.ir.traits import SOURCES
from tfpar.spec import CaptureError
from tfpar.tf.capture.graph_def import split_inputs, split_name, unique_name
from tfpar.tf.interop.graphs import find_op_definition

_VARIABLES = ("Variable", "VariableV2")
_RESOURCE_FORMS = {
    "Assign": "AssignVariableOp",
    "AssignAdd": "AssignAddVariableOp",
    "AssignSub": "AssignSubVariableOp",
    "IsVariableInitialized": "VarIsInitializedOp",
    "RefSwitch": "Switch",
    "RefIdentity": "Identity",
}
"""Ops whose form for resources is not named `Resource...`."""

_HANDLES_ON = ("RefSwitch", "RefIdentity")
"""Ops whose result is a reference of their own, not that of the variable they changed."""

_GIVEN = SOURCES.union({"PlaceholderWithDefault"}, _VARIABLES)
"""Ops that need not be waited for."""


@dataclasses.dataclass(frozen=True)
class Resources:
    """Attributes:
    graph_def: the graph without references.
    reads: by the name of a tensor that was a reference, one that holds the variable's value then.
    """

    graph_def: graph_pb2.GraphDef
    reads: dict[str, str]


def with_resource_variables(graph_def: graph_pb2.GraphDef) -> Resources:
    """Turn the reference variables of `graph_def` into resource variables.

    Raises:
        CaptureError: an op on references that resource variables have no form of.
    """
    if all(node.op not in _VARIABLES for node in graph_def.node):
        return Resources(graph_def, {})
    return _Conversion(graph_def).run()


class _Conversion:
    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self._source = graph_def
        self._nodes = {node.name: node for node in graph_def.node}
        self._names = set(self._nodes)
        self._reads: dict[tuple[str, tuple[str, ...]], node_def_pb2.NodeDef] = {}
        self._result = graph_pb2.GraphDef(versions=graph_def.versions, library=graph_def.library)

    def run(self) -> Resources:
        for node in self._source.node:
            self._result.node.append(self._converted(node))
        named = {}
        for node in self._source.node:
            if self._reference(node.name) is not None:
                after = () if node.op in _VARIABLES else (node.name,)
                named[f"{node.name}:0"] = f"{self._read(node.name, after).name}:0"
        self._result.node.extend(self._reads.values())
        return Resources(self._result, named)

    def _converted(self, source: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
        node = node_def_pb2.NodeDef()
        node.CopyFrom(source)
        if node.op in _VARIABLES:
            _become(node, "VarHandleOp", dtype=source.attr["dtype"], shape=source.attr["shape"])
            node.attr["shared_name"].s = source.attr["shared_name"].s or node.name.encode()
            node.attr["container"].s = source.attr["container"].s
            return node
        data, waits = split_inputs(source)
        takes = list(_takes_reference(source))
        changes = bool(takes and takes[0])
        made = [split_name(name)[0] for name in data if self._reference(name) is None]
        computed = [name for name in made if self._nodes[name].op not in _GIVEN]
        for position, name in enumerate(data):
            if self._reference(name) is None:
                continue
            after = self._changed_by(name)
            if position < len(takes) and takes[position]:
                data[position] = self._handle(name)
                waits += after
            elif node.op == "Identity":
                _become(node, "ReadVariableOp", dtype=source.attr["T"])
                data[position] = self._handle(name)
                waits += after
            else:
                data[position] = self._read(name, (*computed, *waits, *after)).name
        del node.input[:]
        node.input.extend([*data, *(f"^{w}" for w in dict.fromkeys(waits))])
        if changes:
            self._become_resource_form(node, source)
        return node

    def _become_resource_form(
        self, node: node_def_pb2.NodeDef, source: node_def_pb2.NodeDef
    ) -> None:
        form = _RESOURCE_FORMS.get(node.op, f"Resource{node.op}")
        definition = find_op_definition(form)
        if definition is None:
            raise CaptureError(
                f"{node.op} {node.name!r} works on a reference variable, and resource variables "
                f"have no such op. Build the graph with tf.compat.v1.enable_resource_variables()."
            )
        attrs = {a.name: source.attr[a.name] for a in definition.attr if a.name in source.attr}
        if node.op in _HANDLES_ON:
            attrs["T"] = tf.compat.v1.AttrValue(type=tf.resource.as_datatype_enum)
        elif any(a.name == "dtype" for a in definition.attr):
            attrs["dtype"] = source.attr["T"]
        attrs.pop("validate_shape", None)
        _become(node, form, **attrs)

    # --- references --------------------------------------------------------------

    def _reference(self, name: str) -> str | None:
        """The variable that a tensor refers to; None if it is a value."""
        node, index = split_name(name)
        seen = self._nodes.get(node)
        while seen is not None:
            if seen.op in _VARIABLES:
                return seen.name
            definition = find_op_definition(seen.op)
            if definition is None or index >= len(definition.output_arg):
                return None
            if not definition.output_arg[index].is_ref:
                return None
            node, index = split_name(seen.input[0])
            seen = self._nodes.get(node)
        return None

    def _handle(self, name: str) -> str:
        """The resource tensor that takes the place of a reference."""
        node = self._nodes[split_name(name)[0]]
        while node.op not in (*_VARIABLES, *_HANDLES_ON):
            name = node.input[0]
            node = self._nodes[split_name(name)[0]]
        return name

    def _changed_by(self, name: str) -> list[str]:
        """The op that gives a reference, where it has changed the variable."""
        node = self._nodes[split_name(name)[0]]
        return [] if node.op in (*_VARIABLES, *_HANDLES_ON) else [node.name]

    def _read(self, name: str, after: Sequence[str]) -> node_def_pb2.NodeDef:
        """A read of the variable that a reference means, after some ops."""
        key = self._handle(name), tuple(dict.fromkeys(after))
        known = self._reads.get(key)
        if known is None:
            variable = self._nodes[self._reference(name) or ""]
            read = unique_name(f"{split_name(key[0])[0]}/value", self._names)
            known = node_def_pb2.NodeDef(name=read, op="ReadVariableOp")
            known.attr["dtype"].CopyFrom(variable.attr["dtype"])
            known.input.extend([key[0], *(f"^{a}" for a in key[1])])
            self._reads[key] = known
        return known


def _takes_reference(node: node_def_pb2.NodeDef) -> Iterator[bool]:
    """Yield, for each data input of an op on references, whether it has to be a reference."""
    definition = find_op_definition(node.op)
    if definition is None or not any(a.is_ref for a in definition.input_arg):
        return
    for argument in definition.input_arg:
        for _ in range(_length(node, argument)):
            yield argument.is_ref


def _length(node: node_def_pb2.NodeDef, argument: op_def_pb2.OpDef.ArgDef) -> int:
    if argument.number_attr:
        return node.attr[argument.number_attr].i
    if argument.type_list_attr:
        return len(node.attr[argument.type_list_attr].list.type)
    return 1


def _become(node: node_def_pb2.NodeDef, op: str, **attrs: Any) -> None:
    """Turn `node` into another op on the same inputs, with these attributes only."""
    node.op = op
    node.attr.clear()
    for name, value in attrs.items():
        node.attr[name].CopyFrom(value)
