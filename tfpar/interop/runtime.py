"""TensorFlow's runtime in this process: its start, its functions, its ops run one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context, execute


def is_started() -> bool:
    """Whether the runtime has started, after which its devices can no longer be configured."""
    return bool(context.context()._initialized)


def start_server(
    server: tensorflow_server_pb2.ServerDef, leader: str, own_task: str, *, use_nccl: bool
) -> None:
    """Start the runtime as a task of a cluster whose collectives are TensorFlow's own.

    Args:
        server: the cluster, and which of its tasks this process is.
        leader: the task that numbers the collectives.
        own_task: this one; of the cluster it sees no other task's devices.
        use_nccl: whether collectives on GPUs are NCCL's.

    Raises:
        tf.errors.OpError: the server cannot start.
    """
    runtime = context.context()
    runtime.configure_collective_ops(
        collective_leader=leader,
        scoped_allocator_enabled_ops=(),
        use_nccl_communication=use_nccl,
        device_filters=(own_task,),
    )
    server.default_session_config.CopyFrom(runtime.config)
    runtime.enable_collective_ops(server)
    runtime.ensure_initialized()


def global_seed() -> int | None:
    """What `tf.random.set_seed` was last given."""
    return context.global_seed()


def add_function(definition: function_pb2.FunctionDef) -> None:
    """Let the runtime know a function."""
    context.context().add_function_def(definition)


def call_function(name: str, inputs: Sequence[tf.Tensor], num_outputs: int) -> list[tf.Tensor]:
    """Run a function that the runtime knows."""
    return context.context().call_function(name.encode(), list(inputs), num_outputs) or []


def function_definition(name: str) -> function_pb2.FunctionDef:
    """A function as the runtime knows it."""
    return context.context().get_function_def(name)


def remove_function(name: str) -> None:
    """Let the runtime forget a function."""
    context.context().remove_function(name)


def run_op(
    op_type: str, inputs: Sequence[tf.Tensor], attrs: Sequence[Any], num_outputs: int
) -> Sequence[tf.Tensor]:
    """Run one op.

    Args:
        attrs: names and values, one after the other.
    """
    return execute.execute(op_type.encode(), num_outputs, inputs, attrs, context.context())
