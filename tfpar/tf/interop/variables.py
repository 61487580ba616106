"""Variables without a value, and notes of reads and uses for gradient tapes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

__all__ = [
    "UninitializedVariable",
    "note_read",
    "note_use",
    "tapes_may_record",
    "without_tapes",
]


def note_use(variable: tf.Variable) -> None:
    """Let tapes that watch what is used know that a variable is."""
    resource_variable_ops.variable_accessed(variable)


def without_tapes() -> contextlib.AbstractContextManager[None]:
    """Return a context in which no gradient tape records."""
    return record.stop_recording()


def note_read(value: tf.Tensor, handle: tf.Tensor) -> None:
    """Let gradient tapes take `value` for what a read of `handle` gave."""
    record.record_operation(
        "ReadVariableOp",
        [value],
        [handle],
        backward_function=lambda gradient: [gradient],
        forward_function=lambda tangent: [tangent],
    )


def tapes_may_record() -> bool:
    """Whether a gradient tape is open that might record what comes next."""
    return record.could_possibly_record()


# --- calls that stand for plain ops ---------------------------------------------------------
#     value = StatefulPartitionedCall(handle, *shards, f=tfpar_read)            as it runs
#     value = ReadVariableOp(handle)                                            as it is written
#
# The first argument is always the variable's own handle. What runs computes with the handles behind
# it; graphs that leave the process (SavedModels, frozen graphs) and captured steps get the plain
# op.

READ = "tfpar_read"
"""Of functions (handle, ...) -> value."""
WRITE = "tfpar_write"
"""Of functions (handle, value, ...)."""

CALL = "StatefulPartitionedCall"
_NAME = re.compile(rf"__inference_({READ}|{WRITE})_\d+")


def traced_call(kind: str, body: Callable[..., Any], *values: tf.TensorSpec) -> Any:
    """The function of `kind` that runs `body`, as a `ConcreteFunction`.

    Args:
        values: what `body` is given.
    """

    def call(_: tf.Tensor, *given: tf.Tensor) -> Any:
        return body(*given)

    call.__name__ = kind
    with tf.init_scope():
        function = tf.function(call, autograph=False)
        return function.get_concrete_function(tf.TensorSpec([], tf.resource), *values)


def add_call(function: Any, handle: tf.Tensor, *values: tf.Tensor) -> list[tf.Tensor]:
    """Call `function`, made by `traced_call`, in the graph that is being traced.

    The gradient of what it gives goes to `handle`: for tapes that watch a function from outside.
    """
    graph = tf.compat.v1.get_default_graph()
    # Collectives inside meet by names, which scopes may not change.
    with tf.compat.v1.name_scope(""), graph.gradient_override_map({CALL: "TfparRead"}):
        made = tf.raw_ops.StatefulPartitionedCall(
            args=[handle, *values, *function.captured_inputs],
            Tout=[spec.dtype for spec in function.outputs],
            f=function,
            name=kind_of(function.name),
        )
    return list(made) if function.outputs else []


@tf.RegisterGradient("TfparRead")
def _gradient_of_read(op: tf.Operation, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    return [gradient, *[None] * (len(op.inputs) - 1)]


def kind_of(function: str | bytes) -> str | None:
    """`READ` or `WRITE` where a function is named like one of these."""
    match = _NAME.fullmatch(tf.compat.as_str(function))
    return match[1] if match else None


def plain_op(function: str, dtypes: Sequence[Any]) -> tuple[str, int, Any] | None:
    """The op that a call of `function` stands for; None for other functions.

    Args:
        dtypes: of the arguments and then of the results of the call.

    Returns:
        Its type, how many arguments of the call it takes, and the dtype of the value.
    """
    kind = kind_of(function)
    if kind is None:
        return None
    return ("ReadVariableOp", 1, dtypes[-1]) if kind == READ else ("AssignVariableOp", 2, dtypes[1])


def write_plainly(graph: graph_pb2.GraphDef) -> bool:
    """Have the functions of a graph that read and write split variables do so by their handles.

    Returns:
        Whether there are such functions.
    """
    found = [f for f in graph.library.function if kind_of(f.signature.name)]
    for function in found:
        _write_plainly(function)
    return bool(found)


def _write_plainly(function: function_pb2.FunctionDef) -> None:
    signature = function.signature
    arguments = [*signature.input_arg, *signature.output_arg]
    plain = plain_op(signature.name, [argument.type for argument in arguments])
    assert plain is not None  # its caller knows its kind
    op_type, taken, dtype = plain
    function.ClearField("node_def")
    function.ClearField("control_ret")
    signature.ClearField("control_output")
    node = function.node_def.add(name="plain", op=op_type)
    node.input.extend(argument.name for argument in signature.input_arg[:taken])
    node.attr["dtype"].type = dtype
    for result in signature.output_arg:
        function.ret[result.name] = "plain:value:0"
    if not signature.output_arg:
        function.control_ret["plain"] = "plain"
        signature.control_output.append("plain")
