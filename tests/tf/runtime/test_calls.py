"""How TensorFlow is asked to optimize a function that is called."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context

from tfpar.tf.runtime.function_def import FunctionWriter

KINDS = rewriter_config_pb2.RewriterConfig


@pytest.fixture
def asked(monkeypatch):
    """The options of graph optimizers that functions are called with."""
    runtime, found = context.context(), []
    call = runtime.call_function

    def call_function(*arguments):
        config = runtime.function_call_options.config_proto_serialized
        found.append(config_pb2.ConfigProto.FromString(config).graph_options.rewrite_options)
        return call(*arguments)

    monkeypatch.setattr(runtime, "call_function", call_function)
    return found


@pytest.fixture
def same():
    """A function that gives what it takes."""
    writer = FunctionWriter("same")
    writer.output(writer.argument("x", "float32"), "float32")
    return writer.register(stateful=False)


def test_graph_optimizers_go_over_a_function_once(asked, same):
    before = context.context().function_call_options
    (given,) = same([tf.constant(3.0)])
    assert given.numpy() == 3.0
    assert asked[0].meta_optimizer_iterations == KINDS.ONE
    assert context.context().function_call_options is before


def test_what_users_ask_of_graph_optimizers_holds(asked, same, monkeypatch):
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.meta_optimizer_iterations = KINDS.TWO
    config.graph_options.rewrite_options.remapping = KINDS.OFF
    options = context.FunctionCallOptions(config_proto=config)
    monkeypatch.setattr(context.context(), "function_call_options", options)
    same([tf.constant(3.0)])
    assert asked[0].meta_optimizer_iterations == KINDS.TWO
    assert asked[0].remapping == KINDS.OFF


@pytest.mark.parametrize("gpus, kind", [(0, KINDS.NO_MEM_OPT), (1, KINDS.DEFAULT_MEM_OPT)])
def test_tensors_can_move_to_the_host_where_there_are_gpus(asked, same, monkeypatch, gpus, kind):
    config = config_pb2.ConfigProto(device_count={"CPU": 1, "GPU": gpus})
    options = context.FunctionCallOptions(config_proto=config)
    monkeypatch.setattr(context.context(), "function_call_options", options)
    same([tf.constant(3.0)])
    assert asked[0].memory_optimization == kind
