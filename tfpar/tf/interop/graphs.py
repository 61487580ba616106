"""Graphs and functions of TensorFlow: traced, and read from their definitions."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, op_def_pb2
from tensorflow.python.framework import (
    func_graph,
    function_def_to_graph,
    graph_to_function_def,
    op_callbacks,
    op_def_registry,
)
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    CondBranchFuncGraph,
    WhileBodyFuncGraph,
)


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


# --- Ctrl-C while TensorFlow makes a graph ---
#
# Python raises KeyboardInterrupt wherever it is. While a graph is made that is often where the
# exception gets lost: in a `__del__`, in a bare `except:` of Keras, in C++ that calls Python, which
# makes a SystemError of it. Then a whole model is traced before Ctrl-C shows.


class Interrupt:
    """Ctrl-C of which nobody has heard yet."""

    def __init__(self) -> None:
        self._is_pending = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed; again at each call."""
        if self._is_pending:
            raise KeyboardInterrupt

    def press(self) -> None:
        self.check()  # pressed again: at once, wherever this is
        self._is_pending = True

    def on_op(self, *arguments: Any, **names: Any) -> None:
        self.check()


@contextlib.contextmanager
def raise_at_ops(*, at_the_end: bool = False) -> Iterator[Callable[[], None]]:
    """Turn Ctrl-C, while open, into a KeyboardInterrupt of the next op that this thread makes.

    Whoever swallows it gets another one at the op after that, and one is raised at the end at the
    latest. A second Ctrl-C does not wait. Where Python does not handle Ctrl-C (in other threads,
    under handlers of the user's own) nothing changes.

    Args:
        at_the_end: raise it there only; for what must not be left half done, and takes no time.

    Yields:
        Raises KeyboardInterrupt if one is waiting for an op.
    """
    interrupt = Interrupt()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt.check
        return
    with contextlib.ExitStack() as watching:

        def on_signal(number: int, frame: Any) -> None:
            interrupt.press()
            if not at_the_end:  # from now on: watching costs a twentieth of tracing
                watching.enter_context(watched_ops(interrupt.on_op))

        signal.signal(signal.SIGINT, on_signal)
        try:
            yield interrupt.check
        except Exception:
            interrupt.check()  # what came of it where it was swallowed
            raise
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.check()


# --- ops as they are created ----------------------------------------------------------------


@contextlib.contextmanager
def watched_ops(callback: Callable[..., Sequence[tf.Tensor] | None]) -> Iterator[None]:
    """Call `callback(op_type, inputs, attrs, outputs, ...)`, while open, for each op that is made.

    What it returns takes the place of the outputs, unless that is None.
    """
    op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(callback)
