"""Capture of steps from graphs that exist already (`tfpar.tf.capture.graph_sources`).

A `GraphSource` is such a graph. Its variables live outside of any Session, as
`ParallelVariable`s that the graph's own initialisers fill, or that hold the values saved
with the graph; `capture` gives the step that computes some fetches from feeds of static
shapes. `tfpar.tf.graph_program.GraphProgram` runs one like a Session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tfpar.ir.graph import DType, Graph, Op, ShapeAttr, Tensor, Variable
from tfpar.ir.passes.trim import CHECKPOINT, TrimResult, trim
from tfpar.ir.traits import UNCHANGED, origin
from tfpar.spec import CaptureError, TfparError
from tfpar.tf.capture.arrays_v1 import with_element_shapes, without_arrays
from tfpar.tf.capture.branches_v1 import without_branches
from tfpar.tf.capture.graph_def import (
    InlinedGraph,
    find_ancestors,
    import_graph,
    split_name,
    with_static_feeds,
)
from tfpar.tf.capture.loops_v1 import cut_loops, without_loops
from tfpar.tf.capture.reference_variables import with_resource_variables
from tfpar.tf.capture.stacks_v1 import without_stacks
from tfpar.tf.capture.step import CapturedStep
from tfpar.tf.capture.updates import gradients_of_updates
from tfpar.tf.interop.convert import convert_func_graph
from tfpar.tf.variables.parallel_variable import ParallelVariable

_CONTROL_FLOW_V1 = frozenset({"Switch", "Merge", "Enter", "Exit", "LoopCond"})
_OF_TWO_SHAPES = (
    "The branches that Merge {!r} joins give tensors of two shapes. Give them one, or build the "
    "graph with tf.compat.v1.enable_control_flow_v2()."
)


@dataclasses.dataclass(eq=False)
class CapturedGraph(CapturedStep):
    """A captured step of a `GraphSource`.

    Attributes:
        removed: by reason, the ops that the step does without, of those that lead to its fetches.
    """

    removed: dict[str, list[Op]]


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """An entry of the checkpoints that the graph's Saver writes."""

    name: str
    slice: str
    variable: str


class GraphSource:
    """A graph to capture steps from, and its variables.

    Args:
        names: by VarHandleOp node, the variable's name; its shared name if left out.
        trainable: VarHandleOp nodes of the weights.
        initial: by VarHandleOp node, the tensor that is its initial value; where it is
            missing, what the first assignment in the graph assigns.
        values: by VarHandleOp node, gives the value that was saved.
        arguments: other names for tensors that are fed.
        results: what is fetched where no fetches are named.
        effects: operations that run besides `results`.

    Attributes:
        variables: by name.
        removed: by reason, the ops that trimming sets aside before anything is fetched:
            initialisation and checkpoints among them.
        saved: the entries of a checkpoint, as the graph's Saver names them.
        seed: of the initialisers that have none; None lets them draw what they like.
    """

    def __init__(
        self,
        graph_def: graph_pb2.GraphDef,
        *,
        names: Mapping[str, str] | None = None,
        trainable: Iterable[str] = (),
        initial: Mapping[str, str] | None = None,
        values: Mapping[str, Callable[[], tf.Tensor]] | None = None,
        arguments: Mapping[str, str] | None = None,
        results: Mapping[str, str] | None = None,
        effects: Sequence[str] = (),
    ) -> None:
        self.arguments = dict(arguments or {})
        self.results = dict(results or {})
        self.seed: int | None = None
        self._effects = list(effects)
        self._names = names or {}
        self._trainable = set(trainable)
        resources = with_resource_variables(graph_def)
        graph_def, self._reads = resources.graph_def, resources.reads
        self._nodes = {node.name: node for node in graph_def.node}
        self._graph = import_graph(graph_def)
        self._inlined = InlinedGraph(graph_def)
        whole = self._convert(cut_loops(self._inlined.graph_def), (), (), ())
        listed = trim(whole)
        self.removed = listed.removed
        given = {self._name(op): self._inlined.tensor(t) for op, t in (initial or {}).items()}
        found = {name: tensor.name for name, tensor in listed.initial_values.items()}
        self._initial = found | given
        self.saved = _saved_tensors(whole, listed)
        self.variables = {v.name: self._materialize(v, values or {}) for v in whole.variables}

    # --- names -------------------------------------------------------------------

    def fetch(self, what: Any) -> tf.Tensor | tf.Operation:
        """The tensor or operation that `what` (either, a variable, or a name) means.

        Raises:
            CaptureError: there is none; names what is near.
        """
        return self._element(what, self.results)

    def _element(self, what: Any, aliases: Mapping[str, str]) -> tf.Tensor | tf.Operation:
        name = what if isinstance(what, str) else _name_of(what)
        name = aliases.get(name, name)
        try:
            return self._graph.as_graph_element(self._reads.get(name, name))
        except (KeyError, ValueError):
            known = [*aliases, *(op.name for op in self._graph.get_operations())]
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"Did you mean {', '.join(map(repr, near))}?" if near else "Check its name."
            raise CaptureError(f"The graph has no tensor or operation {name!r}. {hint}") from None

    def feed(self, what: Any) -> tf.Tensor:
        """The tensor that is fed as `what` (a tensor or a name)."""
        element = self._element(what, self.arguments)
        if isinstance(element, tf.Operation):
            element = element.outputs[0] if element.outputs else element
        if not isinstance(element, tf.Tensor) or len(element.op.outputs) != 1:
            raise CaptureError(
                f"{element.name!r} cannot be fed: only the result of an op with one output can."
            )
        return element

    def in_session(self, element: tf.Tensor | tf.Operation) -> Any:
        """Return what `session.run` fetches for an element: the name of a tensor or of its ops."""
        if isinstance(element, tf.Tensor):
            return self._inlined.tensor(element.name)
        return tuple(self._inlined.operations(element.name))

    @contextlib.contextmanager
    def session(
        self,
    ) -> Iterator[tuple[tf.compat.v1.Session, Callable[..., None], dict[str, tf.Tensor]]]:
        """A plain Session on the CPU, a function that sets its variables by name, and reads of
        them."""
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(self._inlined.graph_def, name="")
            assigns: dict[str, tuple[tf.Operation, tf.Tensor]] = {}
            reads: dict[str, tf.Tensor] = {}
            for node in self._inlined.graph_def.node:
                if node.op == "VarHandleOp" and self._name(node.name) in self.variables:
                    name, handle = self._name(node.name), graph.get_tensor_by_name(f"{node.name}:0")
                    dtype = tf.as_dtype(node.attr["dtype"].type)
                    given = tf.compat.v1.placeholder(dtype)
                    assign = tf.raw_ops.AssignVariableOp(resource=handle, value=given)
                    assigns[name] = assign, given
                    reads[name] = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
            with tf.compat.v1.Session(graph=graph, config=config) as session:

                def load(values: Mapping[str, np.ndarray]) -> None:
                    for name, (assign, given) in assigns.items():
                        session.run(assign, {given: values[name]})

                yield session, load, reads

    # --- capture -----------------------------------------------------------------

    def capture(self, fetches: Any, feeds: Mapping[Any, Sequence[int]]) -> CapturedGraph:
        """The step that computes `fetches`.

        Args:
            fetches: tensors, operations, variables or names, in any structure.
            feeds: the static shape of each tensor that is fed, in feeding order.

        Raises:
            CaptureError: control flow of version 1 that cannot be converted, resources that
                are not variables, placeholders that are not fed.
        """
        elements = [self.fetch(f) for f in tf.nest.flatten(fetches)]
        fed = [self.feed(f) for f in feeds]
        static = {
            tensor.op.name: (tensor.dtype, shape)
            for tensor, shape in zip(fed, feeds.values(), strict=True)
        }
        outputs = [e.name for e in elements if isinstance(e, tf.Tensor)]
        effects = [e.name for e in elements if isinstance(e, tf.Operation)]
        if fetches is self.results:
            effects += self._effects
        graph_def, selects = self._static(static, [*outputs, *effects])
        try:
            graph = self._convert(graph_def, [t.name for t in fed], outputs, effects)
        except ValueError as error:
            joined = next((name for name in selects if name in str(error)), None)
            if joined is None:
                raise
            raise CaptureError(f"{_OF_TWO_SHAPES.format(joined)} ({error})") from error
        trimmed = trim(graph)
        graph = trimmed.graph
        _drop_unused_variables(graph)
        _check(graph, selects)
        structure = tf.nest.pack_sequence_as(fetches, [_fetched(e) for e in elements])
        variables = [self.variables[v.name] for v in graph.variables]
        return CapturedGraph(
            graph,
            len(fed),
            [],
            variables,
            structure,
            trimmed.removed,
            gradients=gradients_of_updates(graph),
        )

    def _static(
        self, feeds: Mapping[str, tuple[tf.DType, Sequence[int]]], fetched: Sequence[str]
    ) -> tuple[graph_pb2.GraphDef, list[str]]:
        """Extract the subgraph of the fetches, of static shapes, without TensorFlow 1 control flow.

        Args:
            feeds: dtype and shape by op.

        Returns:
            the graph, and the ops in it that select between branches.
        """
        graph_def = with_static_feeds(self._inlined.graph_def, feeds)
        names = [split_name(self._inlined.tensor(name))[0] for name in fetched if ":" in name]
        names += [op for name in fetched for op in self._inlined.operations(split_name(name)[0])]
        graph_def = with_element_shapes(find_ancestors(graph_def, [*names, *feeds]))
        graph_def = without_stacks(without_arrays(graph_def))
        return without_branches(without_loops(find_ancestors(graph_def, [*names, *feeds])))

    def _convert(
        self,
        graph_def: graph_pb2.GraphDef,
        feeds: Sequence[str],
        outputs: Sequence[str],
        effects: Sequence[str],
    ) -> Graph:
        # Inside a plain graph, so that its functions stay out of the eager context.
        with tf.Graph().as_default():
            return self._convert_here(graph_def, feeds, outputs, effects)

    def _convert_here(
        self,
        graph_def: graph_pb2.GraphDef,
        feeds: Sequence[str],
        outputs: Sequence[str],
        effects: Sequence[str],
    ) -> Graph:
        func_graph = import_graph(graph_def)
        func_graph.inputs = [func_graph.get_tensor_by_name(name) for name in feeds]
        func_graph.outputs = [
            func_graph.get_tensor_by_name(self._inlined.tensor(name)) for name in outputs
        ]
        func_graph.control_outputs = [
            func_graph.get_operation_by_name(op)
            for name in effects
            for op in self._inlined.operations(name)
        ]
        graph = convert_func_graph(func_graph)
        self._bind_variables(graph)
        return graph

    def _name(self, node: str) -> str:
        """The name of the variable of VarHandleOp `node`."""
        shared = self._nodes[node].attr["shared_name"].s.decode() if node in self._nodes else ""
        return self._names.get(node) or shared or node

    def _bind_variables(self, graph: Graph) -> None:
        """Turn VarHandleOps into placeholders of the graph's variables."""
        known: dict[str, Tensor] = {}
        merged: dict[Tensor, Tensor] = {}
        for op in graph.ops:
            if op.type == "PlaceholderWithDefault":
                op.type, op.attrs = "Identity", {"T": op.attrs["dtype"]}
            if op.type != "VarHandleOp":
                continue
            name, dtype = self._name(op.name), str(op.attrs["dtype"])
            (handle,) = op.outputs
            if name in known:
                merged[handle] = known[name]
                continue
            shape = op.attrs["shape"]
            if not isinstance(shape, ShapeAttr) or -1 in shape:
                raise CaptureError(
                    f"Variable {name!r} has no static shape; give it one where it is made."
                )
            op.type, op.attrs, op.stateful = "Placeholder", {"dtype": DType("resource")}, False
            handle.shape = tuple(shape)
            known[name] = handle
            graph.variables.append(
                Variable(name, tuple(shape), dtype, op.name in self._trainable, handle)
            )
        for op in graph.ops:
            op.inputs = [merged.get(t, t) for t in op.inputs]

    # --- values ------------------------------------------------------------------

    def _materialize(
        self, variable: Variable, values: Mapping[str, Callable[[], tf.Tensor]]
    ) -> ParallelVariable:
        initial = values.get(variable.handle.op.name)
        with tf.__internal__.eager_context.eager_mode():
            return ParallelVariable(
                shape=variable.shape,
                dtype=variable.dtype,
                trainable=variable.trainable,
                name=variable.name.replace("#", "_"),
                initial_value=initial or functools.partial(self._initial_value, variable.name),
            )

    def _initial_value(self, name: str) -> tf.Tensor:
        if name not in self._initial:
            raise TfparError(
                f"Variable {name!r} has no value: the graph has no initialiser for it. Restore a "
                f"checkpoint, or assign it, before the first run."
            )
        return tf.constant(self._initial_values.pop(name))

    @functools.cached_property
    def _initial_values(self) -> dict[str, Any]:
        """Initial values of all variables, from one run of the initialisers; dropped when used."""
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(_seeded(self._inlined.graph_def, self.seed), name="")
            config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
            with tf.compat.v1.Session(graph=graph, config=config) as session:
                return session.run(self._initial)


def _seeded(graph_def: graph_pb2.GraphDef, seed: int | None) -> graph_pb2.GraphDef:
    """The graph with `seed` for the random ops that have none; as it is if `seed` is None."""
    if seed is None:
        return graph_def
    seeded = graph_pb2.GraphDef()
    seeded.CopyFrom(graph_def)
    for number, node in enumerate(seeded.node):
        if "seed2" in node.attr and not (node.attr["seed"].i or node.attr["seed2"].i):
            node.attr["seed"].i, node.attr["seed2"].i = seed, number + 1
    return seeded


def _name_of(what: Any) -> str:
    """The name of a tensor, operation or variable."""
    if hasattr(what, "_as_graph_element"):
        what = what._as_graph_element()
    if not isinstance(what, (tf.Tensor, tf.Operation)):
        raise CaptureError(
            f"{what!r} cannot be fetched or fed: it is no tensor, operation, variable or name."
        )
    return what.name


def _fetched(element: tf.Tensor | tf.Operation) -> tf.TensorSpec | None:
    """Return the spec of a fetched tensor in the structure of results; None for operations."""
    if isinstance(element, tf.Operation):
        return None
    return tf.TensorSpec(element.shape, element.dtype)


def _saved_tensors(graph: Graph, trimmed: TrimResult) -> list[SavedTensor]:
    """List the tensors that the graph's Savers write; without a Saver, all variables by name."""
    handles = graph.variable_of()
    saved: dict[str, SavedTensor] = {}
    for op in trimmed.removed[CHECKPOINT]:
        if op.type != "SaveV2":
            continue
        names, slices = (_strings(t) for t in op.inputs[1:3])
        for name, part, tensor in zip(names, slices, op.inputs[3:], strict=True):
            tensor = origin(tensor, UNCHANGED | {"ReadVariableOp"})
            if tensor in handles:
                variable = handles[tensor].name
                saved.setdefault(variable, SavedTensor(name, part, variable))
    if not saved:
        return [SavedTensor(v.name, "", v.name) for v in graph.variables]
    return list(saved.values())


def _strings(tensor: Tensor) -> list[str]:
    value = tensor.op.attrs["value"]
    return [item.decode() if isinstance(item, bytes) else str(item) for item in value.ravel()]


def _drop_unused_variables(graph: Graph) -> None:
    readers = graph.consumers()
    unused = {v.handle.op for v in graph.variables if v.handle not in readers}
    graph.variables = [v for v in graph.variables if v.handle.op not in unused]
    graph.ops = [op for op in graph.ops if op not in unused]


def _check(graph: Graph, selects: Sequence[str]) -> None:
    """Raise CaptureError for what a captured step cannot hold."""
    chosen = set(selects)
    bound = {*graph.inputs, *(v.handle for v in graph.variables)}
    for op in graph.ops:
        if op.type in _CONTROL_FLOW_V1:
            raise CaptureError(
                f"{op.type} {op.name!r} is control flow of TensorFlow 1. Build the graph with "
                f"tf.compat.v1.enable_control_flow_v2()."
            )
        if op.name in chosen and op.inputs[1].shape != op.inputs[2].shape:
            shapes = f"{op.inputs[1].shape} and {op.inputs[2].shape}"
            raise CaptureError(f"{_OF_TWO_SHAPES.format(op.name)} ({shapes})")
        if op.type == "Placeholder" and op.outputs[0] not in bound:
            raise CaptureError(f"The fetches need {op.name!r}, which is not fed.")
        if any(t.dtype == "resource" and t not in bound for t in op.outputs):
            raise CaptureError(
                f"{op.type} {op.name!r} is a resource that is not a variable (a table, an "
                f"iterator, a queue). Feed what it gives instead."
            )
