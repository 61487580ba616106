"""Branches of TensorFlow 1 (`Switch` and `Merge`) without dead ends.

In such a graph an op of the branch that is not taken is dead, and so is what it leads to, up to a
`Merge`. Here both branches run: a `Switch` hands on what it gets, a `Merge` selects, and an op
that changes a variable becomes an `If` around itself. Results and values are the same; random ops
of a branch draw in every step.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from tfpar.ir.passes.trim import is_auxiliary
from tfpar.ir.traits import TRACELESS
from tfpar.spec import CaptureError
from tfpar.tf.capture.graph_def import become, set_inputs, split_inputs, split_name, unique_name
from tfpar.tf.interop.graphs import find_op_definition, op_definition

Condition = frozenset[tuple[str, bool]]
"""What has to hold for an op to run: predicates, by the name of the tensor, and their values."""

_ALWAYS: Condition = frozenset()
_SELECTABLE = (tf.resource, tf.variant)


def without_branches(graph_def: graph_pb2.GraphDef) -> tuple[graph_pb2.GraphDef, list[str]]:
    """The graph without `Switch` and `Merge`, and the names of the selects in it.

    The two sides of a select have to be of one shape.

    Raises:
        CaptureError: a `Merge` that does not join two branches, or an effect in a branch that
            cannot be made conditional.
    """
    if all(node.op not in ("Switch", "Merge") for node in graph_def.node):
        return graph_def, []
    return _Predication(graph_def).run()


class _Predication:
    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self._source = graph_def
        self._nodes = {node.name: node for node in graph_def.node}
        self._names = set(self._nodes)
        self._conditions: dict[str, Condition] = {}
        self._predicates: dict[str, str] = {}  # of a Merge, what it selects by
        self._result = graph_pb2.GraphDef(versions=graph_def.versions, library=graph_def.library)

    def run(self) -> tuple[graph_pb2.GraphDef, list[str]]:
        for node in self._source.node:
            self._visit(node.name)
        for node in self._source.node:
            self._result.node.extend(self._rewritten(node))
        return self._result, list(self._predicates)

    # --- when ops run ------------------------------------------------------------

    def _visit(self, root: str) -> None:
        """Find the conditions of `root` and of all that it follows, without recursion."""
        stack = [root]
        while stack:
            name = stack[-1]
            if name in self._conditions:
                stack.pop()
                continue
            data, waits = split_inputs(self._nodes[name])
            before = [split_name(i)[0] for i in (*data, *waits)]
            missing = [b for b in before if b not in self._conditions]
            if missing:
                stack += missing
                continue
            self._conditions[name] = self._condition(self._nodes[name])
            stack.pop()

    def _condition(self, node: node_def_pb2.NodeDef) -> Condition:
        data, waits = split_inputs(node)
        after = _ALWAYS.union(*(self._conditions[w] for w in waits))
        if node.op == "Merge":
            return after | self._merged(node, data)
        return after.union(*map(self._of_tensor, data))

    def _of_tensor(self, name: str) -> Condition:
        source, index = split_name(name)
        node = self._nodes[source]
        if node.op != "Switch":
            return self._conditions[source]
        return self._conditions[source] | {(self._predicate(node.input[1]), index == 1)}

    def _merged(self, node: node_def_pb2.NodeDef, data: list[str]) -> Condition:
        sides = [self._of_tensor(name) for name in data]
        if len(sides) == 2:
            for predicate, value in sorted(sides[0]):
                if (predicate, not value) in sides[1]:
                    self._predicates[node.name] = predicate
                    return (sides[0] & sides[1]) - {(predicate, value)}
        raise CaptureError(
            f"Merge {node.name!r} joins what no tf.cond has parted: {', '.join(data)}. Build the "
            f"graph with tf.compat.v1.enable_control_flow_v2()."
        )

    def _predicate(self, name: str) -> str:
        """The tensor that a predicate is handed on from."""
        source, index = split_name(name)
        while self._nodes[source].op in ("Identity", "Switch"):
            source, index = split_name(self._nodes[source].input[0])
        return f"{source}:{index}"

    # --- the graph that is left --------------------------------------------------

    def _rewritten(self, source: node_def_pb2.NodeDef) -> Iterable[node_def_pb2.NodeDef]:
        node = node_def_pb2.NodeDef()
        node.CopyFrom(source)
        data, waits = split_inputs(source)
        set_inputs(node, list(map(self._handed_on, data)), waits)
        if node.op == "Switch":
            become(node, "Identity", [node.input[0]], waits, T=source.attr["T"])
        elif node.op == "Merge":
            self._select(node, source)
        elif self._conditions[node.name] and _has_effect(node):
            yield from self._conditional(node)
            return
        yield node

    def _handed_on(self, name: str) -> str:
        """The tensor that is read as `name` now."""
        source, index = split_name(name)
        node = self._nodes[source]
        while node.op in ("Switch", "Identity"):
            resource = node.attr["T"].type == tf.resource.as_datatype_enum
            if not resource:
                return source if node.op == "Switch" else name
            name = node.input[0]
            source, index = split_name(name)
            node = self._nodes[source]
        if node.op == "Merge" and index == 1:
            raise CaptureError(
                f"Merge {source!r} is asked which branch was taken (its second output), which is "
                f"not known here. Build the graph with tf.compat.v1.enable_control_flow_v2()."
            )
        return name

    def _select(self, node: node_def_pb2.NodeDef, source: node_def_pb2.NodeDef) -> None:
        predicate = self._predicates[node.name]
        data, waits = split_inputs(node)
        if source.attr["T"].type in [t.as_datatype_enum for t in _SELECTABLE]:
            raise CaptureError(
                f"Merge {node.name!r} joins {tf.as_dtype(source.attr['T'].type).name}s, not "
                f"values. Build the graph with tf.compat.v1.enable_control_flow_v2()."
            )
        first_is_true = (predicate, True) in self._of_tensor(split_inputs(source)[0][0])
        then, other = data if first_is_true else reversed(data)
        inputs = [self._handed_on(predicate).removesuffix(":0"), then, other]
        become(node, "SelectV2", inputs, waits, T=source.attr["T"])

    def _conditional(self, node: node_def_pb2.NodeDef) -> Iterable[node_def_pb2.NodeDef]:
        """`node` within an `If`, and what its predicate is made of."""
        definition = op_definition(node.op)
        resource = tf.resource.as_datatype_enum
        data, waits = split_inputs(node)
        function, types = _function_of(node, data, self._result.library)
        if definition.output_arg or resource not in types:
            raise CaptureError(
                f"{node.op} {node.name!r} stands in a branch of a tf.cond and has an effect that "
                f"cannot be made conditional. Build the graph with "
                f"tf.compat.v1.enable_control_flow_v2()."
            )
        predicate = yield from self._conjunction(node.name)
        nothing = _empty_like(function, self._result.library)
        conditional = node_def_pb2.NodeDef(name=node.name, op="If")
        set_inputs(conditional, [predicate, *data], waits)
        conditional.attr["Tcond"].type = tf.bool.as_datatype_enum
        conditional.attr["Tin"].list.type.extend(types)
        conditional.attr["Tout"].list.SetInParent()
        conditional.attr["then_branch"].func.name = function.signature.name
        conditional.attr["else_branch"].func.name = nothing.signature.name
        yield conditional

    def _conjunction(self, name: str):
        """Yield ops that compute whether `name` runs; returns the tensor of the result."""
        whole = ""
        for predicate, value in sorted(self._conditions[name]):
            one = self._handed_on(predicate).removesuffix(":0")
            if not value:
                yield self._logical("LogicalNot", f"{name}/not", [one])
                one = self._last
            if whole:
                yield self._logical("LogicalAnd", f"{name}/and", [whole, one])
                one = self._last
            whole = one
        return whole

    def _logical(self, op: str, name: str, inputs: list[str]) -> node_def_pb2.NodeDef:
        self._last = unique_name(name, self._names)
        node = node_def_pb2.NodeDef(name=self._last, op=op)
        node.input.extend(inputs)
        return node


def _has_effect(node: node_def_pb2.NodeDef) -> bool:
    definition = find_op_definition(node.op)
    stateful = definition is not None and definition.is_stateful
    return stateful and node.op not in TRACELESS and not is_auxiliary(node.op)


def _function_of(
    node: node_def_pb2.NodeDef, data: list[str], library: function_pb2.FunctionDefLibrary
) -> tuple[function_pb2.FunctionDef, list[int]]:
    """A function that runs `node` on its arguments, added to `library`, and their types."""
    definition = op_definition(node.op)
    function = library.function.add()
    function.signature.name = f"{node.name.replace('/', '_')}_when_taken"
    function.signature.is_stateful = True
    types: list[int] = []
    for argument in definition.input_arg:
        if argument.number_attr:
            types += [_type(node, argument)] * node.attr[argument.number_attr].i
        elif argument.type_list_attr:
            types += node.attr[argument.type_list_attr].list.type
        else:
            types.append(_type(node, argument))
    for position, dtype in enumerate(types):
        function.signature.input_arg.add(name=f"x{position}", type=dtype)
    inner = function.node_def.add()
    inner.CopyFrom(node)
    inner.name = "effect"
    inner.attr.pop("_class", None)
    set_inputs(inner, [f"x{i}" for i in range(len(data))], [])
    function.signature.control_output.append("effect")
    function.control_ret["effect"] = "effect"
    return function, types


def _type(node: node_def_pb2.NodeDef, argument) -> int:
    return node.attr[argument.type_attr].type if argument.type_attr else argument.type


def _empty_like(
    function: function_pb2.FunctionDef, library: function_pb2.FunctionDefLibrary
) -> function_pb2.FunctionDef:
    """A function of the same arguments that does nothing, added to `library`."""
    empty = library.function.add()
    empty.signature.name = f"{function.signature.name}_not"
    empty.signature.input_arg.extend(function.signature.input_arg)
    return empty
