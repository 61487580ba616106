"""A small model written by hand: blocks of two dense layers, a head, and SGD with momentum."""

import dataclasses

import tfpar.rules  # noqa: F401 - registers the rules
from tfpar.ir import DType, Graph, GraphBuilder, Tensor, Variable
from tfpar.propagation import PartitionedGraph, prepare, propagate
from tfpar.spec import Replicate, Shard


def mlp(batch=8, hidden=10, prefix="", activation="Relu", unknown=False, momentum=False) -> Graph:
    """Scopes `mlp/block_0/fc1`, ...; variables `block_0/fc1/kernel`, ...; one scalar output."""
    build = GraphBuilder()
    x = placeholder(build, (batch, 6), "float32", "x")
    build.graph.inputs.append(x)
    layers = (("block_0/fc1", 6, hidden), ("block_0/fc2", hidden, 6), ("head", 6, 5))
    for name, rows, columns in layers:
        build.name = f"mlp/{name}"
        kernel = variable(build, f"{prefix}{name}/kernel", (rows, columns))
        bias = variable(build, f"{prefix}{name}/bias", (columns,))
        attrs = {"T": DType("float32"), "transpose_a": False, "transpose_b": False}
        x = build.one("MatMul", (x, read(build, kernel)), (batch, columns), "float32", attrs)
        x = build.binary("AddV2", x, read(build, bias))
        x = build.unary(activation, x)
        if momentum:
            _update(build, f"{prefix}{name}/kernel", kernel)
    build.name = "loss"
    if unknown:
        x = build.one("Mystery", (x,), x.shape, "float32")
    build.graph.outputs.append(build.reduce("Sum", x, [0, 1]))
    return build.graph


def placeholder(build: GraphBuilder, shape, dtype: str, name: str) -> Tensor:
    attrs = {"dtype": DType(dtype)}
    return build.emit("Placeholder", (), [(shape, dtype)], attrs, name).outputs[0]


def variable(build: GraphBuilder, name: str, shape, trainable=True) -> Tensor:
    handle = placeholder(build, shape, "resource", f"handle/{name}")
    build.graph.variables.append(Variable(name, shape, "float32", trainable, handle))
    return handle


def read(build: GraphBuilder, handle: Tensor) -> Tensor:
    attrs = {"dtype": DType("float32")}
    return build.one("ReadVariableOp", (handle,), handle.shape, "float32", attrs)


def _update(build: GraphBuilder, name: str, weight: Tensor) -> None:
    """m = m + w: ties the slot's dims to the weight's."""
    slot = variable(build, f"sgd/{name.replace('/', '_')}_momentum", weight.shape, False)
    total = build.binary("AddV2", read(build, slot), read(build, weight))
    op = build.emit(
        "AssignVariableOp", (slot, total), [], {"dtype": DType("float32")}, stateful=True
    )
    build.graph.effects.append(op)


def partition(graph: Graph, plan) -> PartitionedGraph:
    """Propagate `plan` with the first input's batch over the plan's batch axes."""
    fed = tuple(Shard(0) if n in plan.batch_axes else Replicate() for n in plan.mesh.axis_names)
    anchors = dataclasses.replace(plan.anchors(), inputs=[fed])
    return propagate(prepare(graph), plan.mesh, anchors)
