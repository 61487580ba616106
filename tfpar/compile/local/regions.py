"""Emitting loops, branches and calls: the op itself, naming local bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import (
    FunctionRef,
    Graph,
    Op,
    Shape,
    ShapeAttr,
    Tensor,
    UnknownShape,
    renamed_functions,
)
from tfpar.propagation.partitioned_graph import Decision, PartitionedGraph
from tfpar.spec import Mesh, Spec, local_shape


def write_region(
    op: Op,
    decision: Decision,
    inputs: Sequence[Tensor],
    build: GraphBuilder,
    mesh: Mesh,
    write_body: Callable[[PartitionedGraph], Graph],
) -> Sequence[Tensor]:
    """Emit `op` on local inputs with its bodies as `write_body` makes them."""
    functions = build.graph.functions
    local_names: dict[str, FunctionRef] = {}
    for name, inner in decision.bodies.items():
        body = write_body(inner)
        local_names[name] = _unused(name, functions)
        functions[local_names[name]] = body
    outputs = [
        (_local(t, spec, mesh), t.dtype)
        for t, spec in zip(op.outputs, decision.strategy.out_specs, strict=True)
    ]
    attrs = {key: renamed_functions(value, local_names) for key, value in op.attrs.items()}
    if attrs.get("output_shapes"):
        attrs["output_shapes"] = [
            ShapeAttr(shape) if _is_plain(shape, dtype) else UnknownShape()
            for shape, dtype in outputs
        ]
    emitted = build.emit(op.type, inputs, outputs, attrs, name=op.name, stateful=op.stateful)
    return emitted.outputs


def _local(tensor: Tensor, spec: Spec, mesh: Mesh) -> Shape:
    return local_shape(tensor.shape, spec, mesh) if tensor.is_static else tensor.shape


def _is_plain(shape: Shape, dtype: str) -> bool:
    return dtype not in ("resource", "variant") and shape is not None and None not in shape


def _unused(name: str, functions: dict[str, Graph]) -> FunctionRef:
    candidate, count = name, 0
    while candidate in functions:
        count += 1
        candidate = f"{name}_{count}"
    return FunctionRef(candidate)
