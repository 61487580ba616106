"""Loops of TensorFlow 1 (`Enter`, `Merge`, `Switch`, `NextIteration`, `Exit`) as `While` ops.

The ops of a loop form a frame. What its `Merge`s carry round becomes the loop's variables, what
enters it as a constant is handed through; what leads to its `LoopCond` is the condition, and what
leads to its `NextIteration`s the body. Frames within frames come first.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2
from tensorflow.python.framework import graph_to_function_def, op_def_registry

from tfpar.capture.branches_v1 import without_branches
from tfpar.capture.graph_def import (
    import_graph,
    leading_to,
    set_inputs,
    set_placeholder,
    split_inputs,
    split_name,
    unique_name,
)
from tfpar.spec import CaptureError

_ENTERS = ("Enter", "RefEnter")
_STACKS = re.compile(r"(Stack|TensorArray)\w*")


def without_loops(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """The graph with a `While` in the place of each frame.

    Raises:
        CaptureError: a loop that keeps values in stacks or tensor arrays (as one does that
            gradients are taken through), or is not made as `tf.while_loop` makes it.
    """
    while any(node.op in _ENTERS for node in graph_def.node):
        graph_def = _Frame.innermost(graph_def).converted()
    return graph_def


def cut_loops(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """A graph without cycles: what a loop carries round becomes a placeholder."""
    if all(node.op != "NextIteration" for node in graph_def.node):
        return graph_def
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    for node in result.node:
        if node.op == "NextIteration":
            set_placeholder(node, tf.as_dtype(node.attr["T"].type), None)
    return result


@dataclasses.dataclass(frozen=True)
class _Variable:
    """What a loop carries round: the ops that its value passes, by name."""

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
        for node in graph_def.node:
            if node.name in members:
                self._refuse_stacks(node)
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
        shapes = self._shapes()
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
            ("cond", [self._nodes[condition].input[0]]), ("body", [*carried, *handed]),
        ):  # fmt: skip
            function = self._function(
                unique_name(f"{name.replace('/', '_')}_{role}", taken), results, arguments, types,
                [shapes[s] for s in sources],
            )  # fmt: skip
            result.library.function.append(function)
            loop.attr[role].func.name = function.signature.name
        waits = [w for e in entries for w in split_inputs(self._nodes[e])[1]]
        set_inputs(loop, sources, list(dict.fromkeys(waits)))
        loop.attr["T"].list.type.extend(types)
        loop.attr["output_shapes"].list.shape.extend(shapes[s].as_proto() for s in sources)
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

    def _refuse_stacks(self, node: node_def_pb2.NodeDef) -> None:
        if _STACKS.fullmatch(node.op):
            raise CaptureError(
                f"{node.op} {node.name!r} keeps values of a loop of TensorFlow 1: gradients are "
                f"taken through it, or it fills a TensorArray. Build the graph with "
                f"tf.compat.v1.enable_control_flow_v2()."
            )

    def _find_variables(self) -> None:
        exits, switches = {}, {}
        for name in self._members:
            node = self._nodes[name]
            if node.op == "Exit":
                exits[split_name(node.input[0])[0]] = name
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
            node.name for node in self._source.node
            if node.name in self._members and node.op in _ENTERS and node.name not in entered
        ]  # fmt: skip

    def _shapes(self) -> Mapping[str, tf.TensorShape]:
        """By name, the shapes of what enters."""
        inputs = [
            self._nodes[e].input[0] for e in (*(v.enter for v in self._variables), *self._constants)
        ]
        graph = import_graph(cut_loops(self._source))
        return {
            name: graph.get_tensor_by_name("{}:{}".format(*split_name(name))).shape
            for name in inputs
        }

    # --- its functions -----------------------------------------------------------

    def _placeholder(self, position: int) -> str:
        return f"loop_argument_{position}"

    def _arguments(self) -> dict[str, str]:
        """By the op that hands a variable or constant to the loop, the argument it stands for."""
        found = {}
        for position, variable in enumerate(self._variables):
            found[variable.merge] = self._placeholder(position)
            if variable.switch is not None:
                found[variable.switch] = self._placeholder(position)
        for position, constant in enumerate(self._constants, len(self._variables)):
            found[constant] = self._placeholder(position)
        return found

    def _function(
        self, name: str, results: Sequence[str], arguments: Mapping[str, str],
        types: Sequence[int], shapes: Sequence[tf.TensorShape],
    ) -> function_pb2.FunctionDef:  # fmt: skip
        body = graph_pb2.GraphDef(versions=self._source.versions, library=self._source.library)
        for position, (dtype, shape) in enumerate(zip(types, shapes, strict=True)):
            node = body.node.add(name=self._placeholder(position))
            set_placeholder(node, tf.as_dtype(dtype), shape)
        for member in self._source.node:
            if member.name in self._members and member.name not in arguments:
                node = body.node.add()
                node.CopyFrom(member)
                data, waits = split_inputs(member)
                kept = [w for w in waits if w in self._members and w not in arguments]
                set_inputs(node, [self._renamed(i, arguments) for i in data], kept)
        ends = [self._renamed(r, arguments) for r in results]
        inputs = [self._placeholder(i) for i in range(len(types))]
        body = leading_to(body, [*(split_name(e)[0] for e in ends), *inputs])
        body, _ = without_branches(body)
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(body, name="")
            function = graph_to_function_def.graph_to_function_def(
                graph,
                [op for op in graph.get_operations() if op.name not in inputs],
                [graph.get_tensor_by_name(f"{i}:0") for i in inputs],
                [graph.get_tensor_by_name("{}:{}".format(*split_name(e))) for e in ends],
            )
        function.signature.name = name
        for position, shape in enumerate(shapes):
            known = function.arg_attr[position].attr["_output_shapes"]
            known.list.shape.append(shape.as_proto())
        function.signature.is_stateful = any(map(_is_stateful, function.node_def))
        return function

    def _renamed(self, name: str, arguments: Mapping[str, str]) -> str:
        return arguments.get(split_name(name)[0], name)


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
    definition = op_def_registry.get(node.op)
    return definition is not None and definition.is_stateful
