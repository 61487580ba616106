"""Graphs and functions of TensorFlow: traced, and read from their definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, op_def_pb2
from tensorflow.python.framework import (
    func_graph,
    function_def_to_graph,
    graph_to_function_def,
    op_def_registry,
)
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    CondBranchFuncGraph,
    WhileBodyFuncGraph,
)

from tfpar.tf.interop.interrupts import raise_at_ops


def trace(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[Any] = (),
    *,
    add_control_dependencies: bool = False,
    interruptible: bool = True,
) -> tf.__internal__.FuncGraph:
    """The graph of `function(*arguments)`, whose variables are captured by handle.

    Unlike a `tf.function`, it makes no function that can be called, and traces once only.

    Args:
        arguments: structures of TensorSpecs, which become placeholders, and plain values.
        add_control_dependencies: ops with effects run in the order in which they were made.
        interruptible: Ctrl-C ends it at the next op; else when all is traced.
    """
    with raise_at_ops(at_the_end=not interruptible) as check:
        return func_graph.func_graph_from_py_func(
            name,
            function,
            tuple(arguments),
            {},
            func_graph=_InterruptibleGraph(name, check),
            add_control_dependencies=add_control_dependencies,
        )


class _InterruptibleGraph(func_graph.FuncGraph):
    """Has no ops for whoever asks after Ctrl-C.

    TensorFlow asks for them to put those with effects into order, which it does of a graph that an
    exception leaves behind, too, and which takes seconds.

    Args:
        check: raises KeyboardInterrupt after Ctrl-C.
    """

    def __init__(self, name: str, check: Callable[[], None]) -> None:
        super().__init__(name)
        self._check = check

    def get_operations(self) -> list[tf.Operation]:
        self._check()
        operations: list[tf.Operation] = super().get_operations()
        return operations


def op_definition(op_type: str) -> op_def_pb2.OpDef:
    """Return TensorFlow's definition of an op type: arguments, attributes, whether it is stateful.

    Raises:
        KeyError: TensorFlow has no such op type.
    """
    definition = find_op_definition(op_type)
    if definition is None:
        raise KeyError(f"TensorFlow has no op type {op_type!r}")
    return definition


def find_op_definition(op_type: str) -> op_def_pb2.OpDef | None:
    """Return TensorFlow's definition of an op type; None where it has none."""
    return op_def_registry.get(op_type)


def graph_of_function(
    definition: function_pb2.FunctionDef, input_shapes: Sequence[tf.TensorShape]
) -> tf.__internal__.FuncGraph:
    """The graph of a function, with shapes inferred from those of its arguments."""
    return function_def_to_graph.function_def_to_graph(definition, input_shapes)


def nodes_of_function(
    definition: function_pb2.FunctionDef,
) -> tuple[graph_pb2.GraphDef, dict[str, str]]:
    """The nodes of a function as those of a graph.

    Returns:
        The nodes, and by the name that a tensor has in functions (`node:argument:0`) the one that
        it has in graphs (`node:0`).
    """
    return function_def_to_graph.function_def_to_graph_def(definition)


def function_of_graph(
    graph: tf.Graph,
    operations: Sequence[tf.Operation],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
) -> function_pb2.FunctionDef:
    """The function that computes `outputs` from `inputs` by `operations` of `graph`."""
    return graph_to_function_def.graph_to_function_def(graph, operations, inputs, outputs)


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Let a handle or a list be known to hold what another one holds."""
    handle_data_util.copy_handle_data(source, target)


def is_body(graph: tf.Graph) -> bool:
    """Whether a graph is the body of a loop, or a branch."""
    return isinstance(graph, (CondBranchFuncGraph, WhileBodyFuncGraph))
