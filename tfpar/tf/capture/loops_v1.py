"""Loops of TensorFlow 1 (`Enter`, `Merge`, `Switch`, `NextIteration`, `Exit`) as `While` ops.

The ops of a loop form a frame. What its `Merge`s carry round becomes the loop's variables, what
enters it as a constant is handed through; what leads to its `LoopCond` is the condition, and what
leads to its `NextIteration`s the body. Frames within frames come first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, graph_pb2, node_def_pb2

from tfpar.spec import CaptureError
from tfpar.tf.capture.branches_v1 import without_branches
from tfpar.tf.capture.graph_def import (
    become,
    find_ancestors,
    import_graph,
    set_inputs,
    set_placeholder,
    split_inputs,
    split_name,
    unique_name,
)
from tfpar.tf.interop.graphs import copy_handle_data, find_op_definition, function_of_graph

_ENTERS = ("Enter", "RefEnter")


def without_loops(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """The graph with a `While` in the place of each frame.

    Raises:
        CaptureError: a loop that is not made as `tf.while_loop` makes it, or whose variables change
            their shapes.
    """
    while any(node.op in _ENTERS for node in graph_def.node):
        graph_def = _Frame.innermost(graph_def).converted()
    return graph_def


def cut_loops(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """A graph without cycles: what a loop of TensorFlow 1 carries round is what entered it."""
    if all(node.op != "NextIteration" for node in graph_def.node):
        return graph_def
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    nodes = {node.name: node for node in result.node}
    for node in result.node:
        if node.op == "Merge":
            data, waits = split_inputs(node)
            before = [nodes[split_name(i)[0]] for i in data]
            if any(b.op == "NextIteration" for b in before):
                (enter,) = (b for b in before if b.op != "NextIteration")
                # The shape of what enters, but, unlike an Identity, not its value.
                attrs = {**enter.attr, "is_constant": True}
                become(node, "Enter", [enter.input[0]], waits, **attrs)
    return result


@dataclasses.dataclass(frozen=True)
class _Variable:
    """Loop variable of a TensorFlow 1 loop: the ops that its value passes, by name."""

    enter: str
    merge: str
    switch: str | None
    next: str
    exit: str | None


class _Frame:
    def __init__(self, graph_def: graph_pb2.GraphDef, name: str, members: set[str]) -> None:
        self._source = graph_def
        self._nodes = {node.name: node for node in graph_def.node}
        self._name = name
        self._members = members
        self._variables: list[_Variable] = []
        self._constants: list[str] = []
        self._find_variables()

    @classmethod
    def innermost(cls, graph_def: graph_pb2.GraphDef) -> _Frame:
        """A frame that no other one is in."""
        readers: dict[str, list[node_def_pb2.NodeDef]] = {}
        entered: dict[str, list[str]] = {}
        for node in graph_def.node:
            for name in node.input:
                readers.setdefault(split_name(name.removeprefix("^"))[0], []).append(node)
            if node.op in _ENTERS:
                entered.setdefault(node.attr["frame_name"].s.decode(), []).append(node.name)
        members = {name: _inside(enters, readers) for name, enters in entered.items()}
        for name, inside in members.items():
            if all(not inside.intersection(entered[other]) for other in entered if other != name):
                return cls(graph_def, name, inside)
        raise CaptureError("The loops of the graph enter each other, which tf.while_loop's do not.")

    def converted(self) -> graph_pb2.GraphDef:
        """The graph with one `While` in the place of the frame."""
        entering = self._entering()
        entries = [v.enter for v in self._variables] + self._constants
        sources = [self._nodes[e].input[0] for e in entries]
        types = [self._nodes[e].attr["T"].type for e in entries]
        result = graph_pb2.GraphDef(versions=self._source.versions, library=self._source.library)
        taken = {f.signature.name for f in result.library.function}
        names = {node.name for node in self._source.node}
        name = unique_name(self._name.rstrip("/").split("/while_context")[0], names)
        (condition,) = (m for m in self._members if self._nodes[m].op == "LoopCond")
        carried = [self._nodes[v.next].input[0] for v in self._variables]
        arguments = self._arguments()
        handed = [f"{self._placeholder(i)}:0" for i in range(len(self._variables), len(entries))]
        loop = node_def_pb2.NodeDef(name=name, op="While")
        for role, results in (
            ("cond", [self._nodes[condition].input[0]]),
            ("body", [*carried, *handed]),
        ):
            function = self._function(
                unique_name(f"{name.replace('/', '_')}_{role}", taken),
                results,
                arguments,
                [entering[s] for s in sources],
            )
            result.library.function.append(function)
            loop.attr[role].func.name = function.signature.name
        waits = [w for e in entries for w in split_inputs(self._nodes[e])[1]]
        set_inputs(loop, sources, list(dict.fromkeys(waits)))
        loop.attr["T"].list.type.extend(types)
        loop.attr["output_shapes"].list.shape.extend(entering[s].shape.as_proto() for s in sources)
        loop.attr["parallel_iterations"].i = 1
        exits = {v.exit: i for i, v in enumerate(self._variables) if v.exit is not None}
        for node in self._source.node:
            if node.name in exits:
                left = node_def_pb2.NodeDef(name=node.name, op="Identity")
                left.attr["T"].CopyFrom(node.attr["T"])
                left.input.append(f"{name}:{exits[node.name]}")
                result.node.append(left)
            elif node.name not in self._members and node.name not in entries:
                result.node.add().CopyFrom(node)
        result.node.append(loop)
        return result

    # --- what the loop is made of ------------------------------------------------

    def _find_variables(self) -> None:
        exits, switches = {}, {}
        for name in self._members:
            node = self._nodes[name]
            if node.op == "Exit":
                exits[self._leaving(node)] = name
            elif node.op == "Switch":
                switches[split_name(node.input[0])[0]] = name
        entered = set()
        for node in self._source.node:
            if node.name not in self._members or node.op != "Merge":
                continue
            enter, after = (split_name(i)[0] for i in split_inputs(node)[0])
            if self._nodes[after].op != "NextIteration":
                continue
            switch = switches.get(node.name)
            left = exits.get(switch or "")
            self._variables.append(_Variable(enter, node.name, switch, after, left))
            entered.add(enter)
        self._constants = [
            node.name
            for node in self._source.node
            if node.name in self._members and node.op in _ENTERS and node.name not in entered
        ]

    def _leaving(self, node: node_def_pb2.NodeDef) -> str:
        """The op whose result an `Exit` lets out; gradients are handed on before it."""
        while (before := self._nodes[split_name(node.input[0])[0]]).op == "Identity":
            node = before
        return before.name

    def _entering(self) -> Mapping[str, tf.Tensor]:
        """Return tensors like those that enter, by name; refuse variables that change shape."""
        graph = import_graph(cut_loops(self._source))

        def tensor(name: str) -> tf.Tensor:
            return graph.get_tensor_by_name("{}:{}".format(*split_name(name)))

        for variable in self._variables:
            before = tensor(self._nodes[variable.enter].input[0]).shape
            after = tensor(self._nodes[variable.next].input[0]).shape
            if not before.is_compatible_with(after):
                raise CaptureError(
                    f"What the loop carries round from Enter {variable.enter!r} has the shape "
                    f"{before} at first and {after} then; it has to keep one."
                )
        enters = [*(v.enter for v in self._variables), *self._constants]
        return {name: tensor(name) for name in (self._nodes[e].input[0] for e in enters)}

    # --- its functions -----------------------------------------------------------

    def _placeholder(self, position: int) -> str:
        return f"loop_argument_{position}"

    def _arguments(self) -> dict[str, str]:
        """Map the ops that hand variables and constants to the loop to its body's arguments."""
        found = {}
        for position, variable in enumerate(self._variables):
            found[variable.merge] = self._placeholder(position)
            if variable.switch is not None:
                found[variable.switch] = self._placeholder(position)
        for position, constant in enumerate(self._constants, len(self._variables)):
            found[constant] = self._placeholder(position)
        return found

    def _function(
        self,
        name: str,
        results: Sequence[str],
        arguments: Mapping[str, str],
        entering: Sequence[tf.Tensor],
    ) -> function_pb2.FunctionDef:
        body = graph_pb2.GraphDef(versions=self._source.versions, library=self._source.library)
        inputs = [self._placeholder(i) for i in range(len(entering))]
        for argument, tensor in zip(inputs, entering, strict=True):
            set_placeholder(body.node.add(name=argument), tensor.dtype, tensor.shape)
        for member in self._source.node:
            if member.name in self._members and member.name not in arguments:
                node = body.node.add()
                node.CopyFrom(member)
                data, waits = split_inputs(member)
                kept = [w for w in waits if w in self._members and w not in arguments]
                set_inputs(node, [self._renamed(i, arguments) for i in data], kept)
        ends = [self._renamed(r, arguments) for r in results]
        needed = [*(split_name(e)[0] for e in ends), *inputs]
        body, _ = without_branches(find_ancestors(body, needed))
        body = find_ancestors(body, needed)
        members = [node for node in body.node if node.name not in inputs]
        read = {split_name(i)[0] for node in members for i in node.input}
        body = graph_pb2.GraphDef(node=members, versions=body.versions, library=body.library)
        with tf.Graph().as_default() as graph:
            given = [_like(t, i) for t, i in zip(entering, inputs, strict=True)]
            tf.import_graph_def(
                body, name="", input_map={g.op.name: g for g in given if g.op.name in read}
            )
            function = function_of_graph(
                graph,
                [op for op in graph.get_operations() if op.name not in inputs],
                given,
                [graph.get_tensor_by_name("{}:{}".format(*split_name(e))) for e in ends],
            )
        function.signature.name = name
        # Who reads the function learns no shapes of variables from its arguments.
        for position, argument in enumerate(given):
            _note_shapes(function.arg_attr[position].attr["_output_shapes"], [argument])
        for node in function.node_def:
            outputs = graph.get_operation_by_name(node.name).outputs
            _note_shapes(node.attr["_output_shapes"], outputs)
        function.signature.is_stateful = any(map(_is_stateful, function.node_def))
        return function

    def _renamed(self, name: str, arguments: Mapping[str, str]) -> str:
        return arguments.get(split_name(name)[0], name)


def _like(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """A placeholder for what is like `tensor`."""
    placeholder = tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name=name)
    copy_handle_data(tensor, placeholder)
    return placeholder


def _note_shapes(attr: attr_value_pb2.AttrValue, tensors: Iterable[tf.Tensor]) -> None:
    attr.list.SetInParent()
    attr.list.shape.extend(t.shape.as_proto() for t in tensors)


def _inside(
    enters: Iterable[str], readers: Mapping[str, Sequence[node_def_pb2.NodeDef]]
) -> set[str]:
    """The ops of a frame, of frames within it too: what follows its `Enter`s up to its `Exit`s."""
    found: set[str] = set()
    stack = list(enters)
    depth = dict.fromkeys(stack, 1)
    while stack:
        name = stack.pop()
        if name in found:
            continue
        found.add(name)
        for node in readers.get(name, ()):
            inner = depth[name] + (node.op in _ENTERS)
            if node.op == "Exit":
                inner -= 1
                if not inner:
                    found.add(node.name)
                    continue
            depth.setdefault(node.name, inner)
            stack.append(node.name)
    return found


def _is_stateful(node: node_def_pb2.NodeDef) -> bool:
    definition = find_op_definition(node.op)
    return definition is not None and definition.is_stateful
