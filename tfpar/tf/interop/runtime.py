"""TensorFlow's runtime in this process: its start, its functions, its ops run one by one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2, tensorflow_server_pb2
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
    """Return the seed that `tf.random.set_seed` was last given."""
    return context.global_seed()


def add_function(definition: function_pb2.FunctionDef) -> None:
    """Let the runtime know a function."""
    context.context().add_function_def(definition)


def call_function(name: str, inputs: Sequence[tf.Tensor], num_outputs: int) -> list[tf.Tensor]:
    """Run a function that the runtime knows; the first time, it is optimized as `_once` says."""
    runtime = context.context()
    asked = runtime.function_call_options
    runtime.function_call_options = _once(asked.executor_type, asked.config_proto_serialized)
    try:
        return runtime.call_function(name.encode(), list(inputs), num_outputs) or []
    finally:
        runtime.function_call_options = asked


@functools.lru_cache(maxsize=8)
def _once(executor_type: str | None, config: bytes) -> context.FunctionCallOptions:
    """Options of calls that have TensorFlow's graph optimizers go over a function once.

    By default they do so twice, which takes up to a third of a large program's first step and
    finds next to nothing more (of a GPT of 4 layers, 25 scalar ops of 4,316): what it computes was
    simplified when it was written. And without GPUs the optimizer of memory, which moves tensors to
    the host, has nothing to do.

    Args:
        config: a serialized `ConfigProto`; what it says of these optimizers holds.
    """
    proto = config_pb2.ConfigProto.FromString(config)
    options, kinds = proto.graph_options.rewrite_options, rewriter_config_pb2.RewriterConfig
    if options.meta_optimizer_iterations == kinds.DEFAULT_NUM_ITERS:
        options.meta_optimizer_iterations = kinds.ONE
    if options.memory_optimization == kinds.DEFAULT_MEM_OPT and not proto.device_count.get("GPU"):
        options.memory_optimization = kinds.NO_MEM_OPT
    return context.FunctionCallOptions(executor_type, proto)


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
