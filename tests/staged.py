"""A step of two stages, written by hand: a local program for each, and what they send each other.

Stage 0 computes `h = x @ a` and sends it forward as bfloat16, with where it is positive (bool) and
as integers; stage 1 computes `y = relu(h) @ b` and sends back what `h` gets of `y - t`. Each
stage splits the batch over its ranks and moves its weight by one where the gradient is positive.
All values are small whole numbers: every order of summation gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.compile.local import Group, LocalProgram, ProgramSet, all_reduce, recv, send
from tfpar.ir import DType, GraphBuilder, Op, Tensor, Variable
from tfpar.spec import Mesh, Replicate, Shard

BATCH, WIDTH, HIDDEN, OUT = 12, 4, 6, 3

Weights = tuple[np.ndarray, np.ndarray]


class Stage:
    """Builds the program of a stage whose batch is split over `num_ranks`."""

    def __init__(self, name: str, num_ranks: int, width: int, weight: tuple[int, int]) -> None:
        self.build = GraphBuilder(name=name)
        self.mesh = Mesh(("data",), (num_ranks,))
        self.rows = BATCH // num_ranks
        self.width = width
        self.fed = self._source((self.rows, width), "float32", f"{name}/fed")
        self.build.graph.inputs.append(self.fed)
        self.handle = self._source(weight, "resource", f"{name}/handle")
        variable = Variable(f"{name}/kernel", weight, "float32", True, self.handle)
        self.build.graph.variables.append(variable)
        attrs = {"dtype": DType("float32")}
        self.kernel = self.build.one("ReadVariableOp", (self.handle,), weight, "float32", attrs)

    def _source(self, shape: tuple[int, ...], dtype: str, name: str) -> Tensor:
        attrs = {"dtype": DType(dtype)}
        return self.build.emit("Placeholder", (), [(shape, dtype)], attrs, name).outputs[0]

    def product(self, x: Tensor, y: Tensor, transposed: str = "") -> Tensor:
        a, b = "a" in transposed, "b" in transposed
        attrs = {"T": DType(x.dtype), "transpose_a": a, "transpose_b": b}
        shape = (x.shape[1 if a else 0], y.shape[0 if b else 1])
        return self.build.one("MatMul", (x, y), shape, x.dtype, attrs)

    def positive(self, x: Tensor) -> Tensor:
        zero = self.build.const(0, x.dtype)
        return self.build.one("Greater", (x, zero), x.shape, "bool", {"T": DType(x.dtype)})

    def both(self, op_type: str, x: Tensor, y: Tensor) -> Tensor:
        return self.build.one(op_type, (x, y), x.shape, x.dtype, {"T": DType(x.dtype)})

    def update(self, gradient: Tensor) -> Op:
        """Move the weight by the sign of its gradient, once that is summed; returns the op."""
        if self.mesh.size > 1:
            gradient = all_reduce(self.build, gradient, (0,), "sum")
        self.build.graph.outputs.append(gradient)
        step = self.build.cast(self.positive(gradient), "float32")
        attrs = {"dtype": DType("float32")}
        op = self.build.emit("AssignSubVariableOp", (self.handle, step), (), attrs, stateful=True)
        self.build.graph.effects.append(op)
        return op

    def program(self) -> LocalProgram:
        graph = self.build.graph
        whole = [(Replicate(),)] * len(graph.outputs)
        specs = {v.name: (Replicate(),) for v in graph.variables}
        shapes = [(BATCH, self.width)]
        return LocalProgram(graph, self.mesh, shapes, [(Shard(0),)], whole, specs)


def first_stage(own: Group, other: Group) -> LocalProgram:
    stage = Stage("first", len(own), WIDTH, (WIDTH, HIDDEN))
    build, shape = stage.build, (stage.rows, HIDDEN)
    h = stage.product(stage.fed, stage.kernel)
    send(build, build.cast(h, "bfloat16"), "first/h", other)
    send(build, stage.positive(h), "first/positive", other)
    send(build, build.cast(h, "int64"), "first/whole", other)
    positive = recv(build, shape, "bool", "second/positive", other, control=[h.op])
    gradient = build.cast(recv(build, shape, "bfloat16", "second/gradient", other), "float32")
    gradient = stage.both("Mul", gradient, build.cast(positive, "float32"))
    stage.update(stage.product(stage.fed, gradient, "a"))
    return stage.program()


def second_stage(own: Group, other: Group) -> LocalProgram:
    """Receives in another order than the first stage sends."""
    stage = Stage("second", len(own), OUT, (HIDDEN, OUT))
    build, shape = stage.build, (stage.rows, HIDDEN)
    whole = recv(build, shape, "int64", "first/whole", other)
    positive = recv(build, shape, "bool", "first/positive", other)
    h = build.cast(recv(build, shape, "bfloat16", "first/h", other), "float32")
    relu = stage.both("Mul", h, build.cast(positive, "float32"))
    error = stage.both("Sub", stage.product(relu, stage.kernel), stage.fed)
    send(build, positive, "second/positive", other, control=[error.op])
    gradient = stage.product(error, stage.kernel, "b")
    send(build, build.cast(gradient, "bfloat16"), "second/gradient", other)
    stage.update(stage.product(relu, error, "a"))
    if stage.mesh.size > 1:
        attrs = {"axes": (0,), "dims": (0,)}
        whole = build.one("AllGather", (whole,), (BATCH, HIDDEN), "int64", attrs)
    build.graph.outputs.append(whole)
    return stage.program()


def groups(size: int) -> tuple[Group, Group]:
    half = size // 2
    return tuple(range(half)), tuple(range(half, size))


def two_stages(size: int) -> ProgramSet:
    """Each stage on one half of the ranks."""
    first, second = groups(size)
    return ProgramSet({first: first_stage(first, second), second: second_stage(second, first)})


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    return (
        rng.integers(0, 3, (BATCH, WIDTH)).astype("float32"),
        rng.integers(0, 3, (BATCH, OUT)).astype("float32"),
    )


def initial() -> Weights:
    rng = np.random.default_rng(100)
    return (
        rng.integers(-1, 2, (WIDTH, HIDDEN)).astype("float32"),
        rng.integers(-1, 2, (HIDDEN, OUT)).astype("float32"),
    )


def plainly(weights: Weights, step: int) -> tuple[Weights, list[np.ndarray]]:
    """The step in NumPy: the weights after it, and its results."""
    (x, t), (a, b) = batch(step), weights
    h = x @ a
    relu = np.maximum(h, 0)
    error = relu @ b - t
    gradient = (error @ b.T) * (h > 0)
    of_a, of_b = x.T @ gradient, relu.T @ error
    return (a - (of_a > 0), b - (of_b > 0)), [of_a, of_b, h.astype("int64")]


class Stored:
    """The variables of a program that ranks of this process hold."""

    def __init__(self, value: np.ndarray, devices: Sequence[str], holding: Sequence[int]) -> None:
        self.shards: dict[int, Any] = {}
        for rank in set(holding):
            with tf.device(devices[rank]):
                self.shards[rank] = tf.Variable(value)

    @property
    def handles(self) -> dict[int, tf.Tensor]:
        return {rank: shard.handle for rank, shard in self.shards.items()}

    def check(self, expected: np.ndarray) -> None:
        for shard in self.shards.values():
            np.testing.assert_array_equal(shard.numpy(), expected)
