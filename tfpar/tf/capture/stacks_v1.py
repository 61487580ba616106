"""Stacks of TensorFlow 1 (`StackV2`) as tensor lists that loops carry round.

`tf.gradients` keeps the values of a loop on stacks: the forward loop pushes, the backward loop
pops. A stack enters both as a handle. Here it is a list that the one loop leaves and the other
enters, like any variable of theirs; in loops within loops it goes through all of them. It is
pushed to and popped from in each round, whichever branches are taken, since both of them run here:
see `branches_v1`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from tfpar.spec import CaptureError
from tfpar.tf.capture.graph_def import (
    GraphCopy,
    become,
    import_graph,
    set_inputs,
    split_inputs,
    split_name,
)
from tfpar.tf.capture.loops_v1 import cut_loops

_HANDS_ON = ("Enter", "Switch", "Identity")
"""Ops by which the handle of a stack gets to a push or pop."""


def without_stacks(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """The graph with a tensor list in the place of each stack.

    Raises:
        CaptureError: a stack that is used as `tf.gradients` does not use them.
    """
    if all(node.op != "StackV2" for node in graph_def.node):
        return graph_def
    return _Conversion(graph_def).run()


@dataclasses.dataclass(frozen=True)
class _Use:
    """A push or pop, and how the stack gets to it.

    Attributes:
        enters: the loops that it is in, outermost first.
        guards: the branches that it is in, outermost first: predicates, and the output of a
            `Switch` that is taken.
    """

    node: node_def_pb2.NodeDef
    enters: list[node_def_pb2.NodeDef]
    guards: list[tuple[str, int]]


class _Conversion:
    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self._copy = GraphCopy(graph_def)
        self._result, self._nodes = self._copy.graph_def, self._copy.nodes
        self._handles: set[str] = set()
        self._frames = dict(self._find_frames())
        self._read = _read_as_data(graph_def)

    def run(self) -> graph_pb2.GraphDef:
        pushes = {self._stack(n): n for n in self._result.node if n.op == "StackPushV2"}
        pops: dict[str, node_def_pb2.NodeDef] = {}
        for node in self._result.node:
            if node.op == "StackPopV2":
                stack = self._stack(node)
                if stack not in pushes or stack in pops:
                    raise CaptureError(
                        f"StackPopV2 {node.name!r} is not the one pop behind the one push of a "
                        f"stack, as tf.gradients makes them. Build the graph with "
                        f"tf.compat.v1.enable_control_flow_v2()."
                    )
                pops[stack] = node
        for stack, pop in list(pops.items()):
            if pop.name not in self._read:  # the backward loop waits for it, no more
                self._become_constant(self._use(pops.pop(stack)), 0)
        for stack, value in self._pushed(pushes, pops).items():
            push, pop = self._use(pushes[stack]), self._use(pops[stack])
            known = tf.get_static_value(value)
            if known is not None:
                self._become_constant(pop, known)
            else:
                self._become_list(stack, push, pop, value)
        for push in pushes.values():
            data, waits = split_inputs(push)
            become(push, "Identity", [data[1]], waits, T=push.attr["T"])
        kept = [n for n in self._result.node if n.name not in self._handles]
        for node in kept:
            data, waits = split_inputs(node)
            set_inputs(node, data, [w for w in waits if w not in self._handles])
        return graph_pb2.GraphDef(
            node=kept, versions=self._result.versions, library=self._result.library
        )

    # --- how stacks are used -----------------------------------------------------

    def _find_frames(self) -> Iterable[tuple[bytes, tuple[str, str]]]:
        """Yield the frames by name, each with one of its `Merge`s and its `LoopCond`."""
        for node in self._result.node:
            if node.op == "Switch" and self._op(node.input[1]).op == "LoopCond":
                merge = self._op(node.input[0])
                frame = self._op(merge.input[0]).attr["frame_name"].s
                yield frame, (merge.name, node.input[1])

    def _op(self, tensor: str) -> node_def_pb2.NodeDef:
        return self._nodes[split_name(tensor)[0]]

    def _stack(self, use: node_def_pb2.NodeDef) -> str:
        """The `StackV2` that a push or pop works on; notes what hands on its handle."""
        node = self._op(use.input[0])
        while node.op in _HANDS_ON:
            self._handles.add(node.name)
            node = self._op(node.input[0])
        if node.op != "StackV2":
            raise CaptureError(
                f"{use.op} {use.name!r} works on what {node.op} {node.name!r} gives, which is no "
                f"stack. Build the graph with tf.compat.v1.enable_control_flow_v2()."
            )
        self._handles.add(node.name)
        return node.name

    def _use(self, node: node_def_pb2.NodeDef) -> _Use:
        use = _Use(node, [], [])
        name = node.input[0]
        while (before := self._op(name)).op in _HANDS_ON:
            if before.op == "Enter":
                use.enters.insert(0, before)
            elif before.op == "Switch" and not use.enters:  # of the innermost loop
                use.guards.insert(0, (before.input[1], split_name(name)[1]))
            name = before.input[0]
        return use

    def _pushed(
        self, pushes: dict[str, node_def_pb2.NodeDef], pops: dict[str, node_def_pb2.NodeDef]
    ) -> dict[str, tf.Tensor]:
        """Return, for each stack, a tensor like those pushed; what is popped has their shape."""
        graph_def = cut_loops(self._result)
        nodes = {node.name: node for node in graph_def.node}
        for stack, pop in pops.items():
            push = pushes[stack]
            inputs = [split_inputs(push)[0][1]]
            become(nodes[pop.name], "Identity", inputs, [], T=push.attr["T"])
        graph = import_graph(graph_def)
        return {
            stack: graph.get_tensor_by_name("{}:{}".format(*split_name(push.input[1])))
            for stack, push in pushes.items()
            if stack in pops
        }

    # --- what becomes of them ----------------------------------------------------

    def _become_constant(self, pop: _Use, value: Any) -> None:
        """Replace the pop of a stack by a constant: a loop-invariant value needs no stack."""
        dtype, after = tf.as_dtype(pop.node.attr["elem_type"].type), split_inputs(pop.node)[1]
        if pop.enters:  # a constant is where it waits
            after = [*after, self._frames[pop.enters[-1].attr["frame_name"].s][0]]
        proto = tf.make_tensor_proto(value, dtype)
        constant = self._copy.add(
            f"{pop.node.name}/value", "Const", [], after, dtype=dtype, value=proto
        )
        self._guard(pop, constant, dtype)

    def _guard(self, pop: _Use, value: str, dtype: tf.DType) -> None:
        """`value` in the place of what is popped, in the branches that it is popped in."""
        name, after = pop.node.name, split_inputs(pop.node)[1]
        for predicate, index in pop.guards:
            switch = self._copy.add(f"{name}/taken", "Switch", [value, predicate], T=dtype)
            value = f"{switch}:{index}"
        become(pop.node, "Identity", [value], after, T=dtype)

    def _become_list(self, stack: str, push: _Use, pop: _Use, value: tf.Tensor) -> None:
        """The list that `push` fills and `pop` empties."""
        (size,), waits = split_inputs(self._nodes[stack])
        shape = self._copy.add_shape(stack, value.shape, [split_name(size)[0], *waits])
        empty = self._copy.add(
            f"{stack}/empty",
            "EmptyTensorList",
            [shape, size],
            waits,
            element_dtype=value.dtype,
            shape_type=tf.int32,
        )

        def fill(taken: str) -> str:
            data, after = split_inputs(push.node)
            return self._copy.add(
                f"{push.node.name}/list",
                "TensorListPushBack",
                [taken, data[1]],
                after,
                element_dtype=value.dtype,
            )

        def take(filled: str) -> str:
            name, after = pop.node.name, split_inputs(pop.node)[1]
            shape = self._copy.add_shape(name, value.shape, [split_name(filled)[0], *after])
            left = self._copy.add(
                f"{name}/list",
                "TensorListPopBack",
                [filled, shape],
                after,
                element_dtype=value.dtype,
            )
            # Says the shape, which the lists of a function do not.
            item = self._copy.add(
                f"{name}/item",
                "EnsureShape",
                [f"{left}:1"],
                after,
                T=value.dtype,
                shape=value.shape,
            )
            self._guard(pop, item, value.dtype)
            return left

        self._carried(pop.enters, self._carried(push.enters, empty, fill), take)

    def _carried(
        self, enters: Sequence[node_def_pb2.NodeDef], given: str, change: Callable[[str], str]
    ) -> str:
        """A list as `change` leaves it in the loops that it enters, outermost first."""
        if not enters:
            return change(given)
        name, frame = enters[0].name, enters[0].attr["frame_name"].s
        variant = {"T": tf.variant}
        entered = self._copy.add(
            f"{name}/list",
            "Enter",
            [given],
            frame_name=frame,
            is_constant=False,
            parallel_iterations=1,
            **variant,
        )
        merge = self._copy.add(f"{name}/merge", "Merge", [entered, entered], N=2, **variant)
        _, condition = self._frames[frame]
        switch = self._copy.add(f"{name}/switch", "Switch", [merge, condition], **variant)
        inside = self._copy.add(f"{name}/inside", "Identity", [f"{switch}:1"], **variant)
        changed = self._carried(enters[1:], inside, change)
        after = self._copy.add(f"{name}/next", "NextIteration", [changed], **variant)
        self._nodes[merge].input[1] = after
        return self._copy.add(f"{name}/left", "Exit", [switch], **variant)


def _read_as_data(graph_def: graph_pb2.GraphDef) -> set[str]:
    """The ops whose results are used, not only waited for or handed on to where they are."""
    nodes = {node.name: node for node in graph_def.node}
    read: set[str] = set()
    stack = [i for n in graph_def.node if n.op != "Identity" for i in split_inputs(n)[0]]
    while stack:
        name = split_name(stack.pop())[0]
        if name not in read:
            read.add(name)
            if nodes[name].op == "Identity":
                stack += split_inputs(nodes[name])[0]
    return read
