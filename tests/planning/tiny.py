"""Training steps of a few ops, written by hand: forward, backward, and SGD. They need no
TensorFlow."""

from __future__ import annotations

import numpy as np

import tfpar.rules  # noqa: F401 - registers the rules
from tests.ir.blocks import weight
from tfpar.cluster import Cluster, Device, Level
from tfpar.ir import DType, Graph, GraphBuilder, Tensor, fingerprint
from tfpar.planning.meshes import logical_meshes
from tfpar.planning.objective import Objective
from tfpar.planning.problem import Problem, ProblemInstance, SearchAim, StepToPlan
from tfpar.spec import Mesh


class Step:
    """A step that grows forward, then backward (`train`).

    Args:
        batch, width: of its only input.
    """

    def __init__(self, batch: int, width: int) -> None:
        self.build = GraphBuilder()
        self.x = self._placeholder("x", (batch, width), "float32")
        self.build.graph.inputs.append(self.x)
        self._layers: list[tuple[str, Tensor, Tensor, Tensor | None]] = []

    def _placeholder(self, name: str, shape, dtype: str) -> Tensor:
        attrs = {"dtype": DType(dtype)}
        return self.build.emit("Placeholder", (), [(shape, dtype)], attrs, name).outputs[0]

    def dense(self, name: str, x: Tensor, units: int, activation: str | None = None) -> Tensor:
        """activation(x @ kernel)."""
        self.build.name = name
        kernel = weight(self.build, f"{name}/kernel", (x.shape[-1], units))
        y = self._matmul(x, kernel)
        if activation is not None:
            y = self.build.unary(activation, y)
        self._layers.append((name, x, kernel, y if activation == "Relu" else None))
        return y

    def _matmul(self, a: Tensor, b: Tensor, ta: bool = False, tb: bool = False) -> Tensor:
        rows = a.shape[1 if ta else 0]
        columns = b.shape[0 if tb else 1]
        attrs = {"T": DType("float32"), "transpose_a": ta, "transpose_b": tb}
        return self.build.one("MatMul", (a, b), (rows, columns), "float32", attrs)

    def forward(self, y: Tensor) -> Graph:
        """The graph that only sums what it makes."""
        self.build.name = "loss"
        self.build.graph.outputs.append(self.build.reduce("Sum", y, [0, 1]))
        return self.build.graph

    def train(self, y: Tensor, loss: bool = True) -> Graph:
        """The step of a chain of layers, each of which is updated, with the loss |y|^2 / 2, which
        may be left out: its gradient is `y`."""
        build = self.build
        build.name = "loss"
        if loss:
            build.graph.outputs.append(build.reduce("Sum", build.binary("Mul", y, y), [0, 1]))
        gradient = y
        for name, x, kernel, activated in reversed(self._layers):
            build.name = f"gradients/{name}"
            if activated is not None:
                attrs = {"T": DType("float32")}
                operands = (gradient, activated)
                gradient = build.one("ReluGrad", operands, gradient.shape, "float32", attrs)
            update = self._matmul(x, gradient, ta=True)
            if x is not self.x:
                gradient = self._matmul(gradient, kernel, tb=True)
            build.name = f"sgd/{name}"
            handle = kernel.op.inputs[0]
            op = build.emit(
                "AssignSubVariableOp",
                (handle, update),
                [],
                {"dtype": DType("float32")},
                stateful=True,
            )
            build.graph.effects.append(op)
        return build.graph


def chain(batch: int, *widths: int, activation: str | None = "Relu", train: bool = True) -> Graph:
    """A step of dense layers, one after the other."""
    step = Step(batch, widths[0])
    y = step.x
    for i, units in enumerate(widths[1:], 1):
        y = step.dense(f"layer_{i}", y, units, activation if i + 1 < len(widths) else None)
    return step.train(y) if train else step.forward(y)


def towers(batch: int, width: int, units: int) -> Graph:
    """Two layers side by side, whose results are added up."""
    step = Step(batch, width)
    sides = [step.dense(side, step.x, units) for side in ("left", "right")]
    return step.forward(step.build.binary("AddV2", *sides))


def gated(batch: int, width: int, units: int) -> Graph:
    """One layer times another one, then a third."""
    step = Step(batch, width)
    gate = step.dense("gate", step.x, units, "Sigmoid")
    product = step.build.binary("Mul", gate, step.dense("value", step.x, units))
    return step.forward(step.dense("out", product, width))


def layer(batch: int, width: int, units: int) -> Graph:
    """The smallest step: two products and an update."""
    step = Step(batch, width)
    return step.train(step.dense("layer", step.x, units), loss=False)


SMALLEST = {
    "a layer": lambda: layer(64, 32, 48),
    "a wide layer": lambda: layer(8, 512, 2048),
    "a long batch": lambda: layer(4096, 16, 16),
    "a narrow layer": lambda: layer(64, 2048, 4),
    "an odd layer": lambda: layer(30, 45, 75),
    "a layer that is not trained": lambda: chain(64, 256, 256, train=False),
    "its activation": lambda: chain(64, 64, 64, 16, activation=None, train=False),
}
"""Of so few ops that every way to run each can be tried with each."""

GRAPHS = {
    "one layer": lambda: chain(64, 32, 48),
    "a large weight": lambda: chain(8, 512, 1024),
    "a large batch": lambda: chain(4096, 16, 16),
    "narrow, wide, narrow": lambda: chain(16, 64, 2048, 64),
    "wide, narrow, wide": lambda: chain(64, 1024, 32, 1024),
    "a wide head": lambda: chain(32, 64, 64, 8000),
    "sizes that two does not divide": lambda: chain(30, 45, 75, activation="Tanh", train=False),
    "three layers": lambda: chain(128, 256, 256, 256, 256, train=False),
    "towers": lambda: towers(64, 128, 512),
    "gated": lambda: gated(64, 128, 1024),
}


def slow_cluster(mesh: Mesh) -> Cluster:
    """Devices so slow that even such graphs are worth splitting."""
    device = Device({"float32": 1e9}, 2**30, 1e12, 1e-7)
    links = zip(mesh.shape, (1e9, 4e9), strict=False)
    levels = [Level(size, bandwidth, 1e-6) for size, bandwidth in links]
    return Cluster.regular("slow", device, levels)


def problem(graph: Graph, shape: list[int]) -> Problem:
    """The problem of planning `graph`; the fastest plan is asked for."""
    mesh = Mesh.of(shape)
    step = StepToPlan(graph, frozenset(graph.inputs), fingerprint(graph), graph.variables)
    instance = ProblemInstance(step, slow_cluster(mesh))
    return Problem(instance, logical_meshes(mesh), aim=SearchAim(Objective(uncertainty=0.0)))


def drawn(seed: int) -> Problem:
    """A chain of three to five layers on machines of any kind, drawn at random."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 6))
    widths = [int(2 ** rng.integers(3, 11)) for _ in range(count + 1)]
    batch = int(2 ** rng.integers(2, 12))
    mesh = ([2], [2, 2], [2, 3], [2, 2], [8])[int(rng.integers(5))]
    asked = problem(chain(batch, *widths, train=bool(rng.integers(2))), mesh)
    flops, memory = 10.0 ** rng.uniform(8, 12), 10.0 ** rng.uniform(9, 12)
    device = Device({"float32": flops}, 2**40, memory, 1e-7)
    levels = [Level(n, 10.0 ** rng.uniform(7, 10), 10.0 ** rng.uniform(-7, -4)) for n in mesh]
    return asked.with_cluster(Cluster.regular("drawn", device, levels))
