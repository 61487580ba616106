"""A training step written by hand: two layers, their gradients, and what a trace leaves behind."""

from __future__ import annotations

from tfpar.ir import DType, Gradient, GraphBuilder, StepGraph, Tensor, Variable

BATCH, WIDTH = 8, 4


def mlp_step() -> StepGraph:
    """Relu of a product, another product, the sum; SGD, with the gradients bundled."""
    build = GraphBuilder()
    x = _fed(build, "x", (BATCH, WIDTH), "float32")
    handles = [_fed(build, f"w{i}/handle", (WIDTH, WIDTH), "resource") for i in range(2)]
    first, second = (_read(build, handle) for handle in handles)
    build.name = "fc0"
    hidden = build.unary("Relu", _product(build, x, first))
    build.name = "fc1"
    y = _product(build, hidden, second)
    build.name = "loss"
    loss = build.reduce("Sum", y, [0, 1])
    build.name = "gradient/loss"
    shape = build.one("Shape", (y,), (2,), "int32", {"T": DType("float32")})
    attrs = {"T": DType("float32"), "index_type": DType("int32")}
    dy = build.one("Fill", (shape, build.const(1.0, "float32")), y.shape, "float32", attrs)
    build.name = "gradient/fc1"
    d_second = _product(build, hidden, dy, transpose_a=True)
    d_hidden = _product(build, dy, second, transpose_b=True)
    build.name = "gradient/fc0"
    attrs = {"T": DType("float32")}
    d_relu = build.one("ReluGrad", (d_hidden, hidden), hidden.shape, "float32", attrs)
    d_first = _product(build, x, d_relu, transpose_a=True)
    build.name = "clip"
    gradients = (d_first, d_second)
    kinds = [(t.shape, t.dtype) for t in gradients]
    bundled = build.emit("IdentityN", gradients, kinds, {"T": [DType("float32")] * 2}).outputs
    build.name = "sgd"
    for handle, gradient in zip(handles, bundled, strict=True):
        step = build.binary("Mul", gradient, build.const(0.1, "float32"))
        attrs = {"dtype": DType("float32"), "validate_shape": False}
        update = build.emit("AssignSubVariableOp", (handle, step), (), attrs, stateful=True)
        build.graph.effects.append(update)
    build.graph.inputs, build.graph.outputs = [x], [loss]
    build.graph.variables = [
        Variable(f"fc{i}/kernel", (WIDTH, WIDTH), "float32", True, handle)
        for i, handle in enumerate(handles)
    ]
    marks = [Gradient(f"fc{i}/kernel", gradient) for i, gradient in enumerate(bundled)]
    return StepGraph(build.graph, 1, gradients=marks)


def _fed(build: GraphBuilder, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    attrs = {"dtype": DType(dtype)}
    return build.emit("Placeholder", (), [(shape, dtype)], attrs, name).outputs[0]


def _read(build: GraphBuilder, handle: Tensor) -> Tensor:
    build.name = handle.op.scope
    attrs = {"dtype": DType("float32")}
    return build.one("ReadVariableOp", (handle,), handle.shape, "float32", attrs)


def _product(build: GraphBuilder, a: Tensor, b: Tensor, **transposed: bool) -> Tensor:
    attrs = {"transpose_a": False, "transpose_b": False, **transposed, "T": DType("float32")}
    return build.one(
        "MatMul", (a, b), (a.shape[-1 if attrs["transpose_a"] else 0], WIDTH), "float32", attrs
    )
