"""Small graphs in numpy: what they compute, and graphs at random to compute."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tfpar.ir import DType, Graph, GraphBuilder, Op, Tensor

N = 6


def run(graph: Graph, fed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The graph's outputs by name.

    Args:
        fed: by the names of placeholders.
    """
    values: dict[Tensor, np.ndarray] = {}
    for op in graph.ops:
        assert all(t in values for t in op.inputs), f"{op} comes before what it reads"
        found = _computed(op, [values[t] for t in op.inputs], fed)
        assert found.shape == op.outputs[0].shape, op
        values[op.outputs[0]] = found
    return {t.name: values[t] for t in graph.outputs}


def _computed(op: Op, inputs: list[np.ndarray], fed: Mapping[str, np.ndarray]) -> np.ndarray:
    if op.type == "Placeholder":
        return fed[op.name]
    if op.type == "Const":
        return np.asarray(op.attrs["value"])
    if op.type in ("AddN", "AddV2", "Add"):
        assert op.type != "AddN" or op.attrs["N"] == len(inputs)
        assert op.type == "AddN" or len(inputs) == 2
        return np.asarray(sum(inputs))
    if op.type == "Pack":
        assert op.attrs["N"] == len(inputs)
        return np.stack(inputs, op.attrs["axis"])
    if op.type in ("Sum", "Max", "All"):
        reduce = {"Sum": np.sum, "Max": np.max, "All": np.all}[op.type]
        return np.asarray(reduce(inputs[0], axis=tuple(inputs[1].reshape(-1))))
    if op.type == "Reshape":
        return inputs[0].reshape(inputs[1])
    if op.type == "Transpose":
        return inputs[0].transpose(inputs[1])
    if op.type == "Cast":
        return inputs[0].astype({"float32": "f4", "float16": "f2"}[op.attrs["DstT"]])
    if op.type in ("Neg", "Mul"):
        return -inputs[0] if op.type == "Neg" else inputs[0] * inputs[1]
    raise NotImplementedError(op.type)


class Arithmetic:
    """A graph by hand on `N` numbers each, whole and small: sums are exact in any order.

    Attributes:
        stage: of each op; constants are in stage 0.
    """

    def __init__(self) -> None:
        self.build = GraphBuilder()
        self.stage: dict[Op, int] = {}
        self.fed: dict[str, np.ndarray] = {}

    @property
    def graph(self) -> Graph:
        return self.build.graph

    def stages(self) -> dict[Op, int]:
        return {op: self.stage.get(op, 0) for op in self.graph.ops}

    def source(self, stage: int, shape: tuple[int, ...] = (N,), dtype: str = "float32") -> Tensor:
        attrs = {"dtype": DType(dtype)}
        op = self.build.emit("Placeholder", (), [(shape, dtype)], attrs, f"s{stage}")
        self.stage[op] = stage
        rng = np.random.default_rng(len(self.graph.ops))
        self.fed[op.name] = np.asarray(rng.integers(-3, 4, shape), dtype)
        return op.outputs[0]

    def at(self, stage: int, made: Tensor) -> Tensor:
        self.stage[made.op] = stage
        return made

    def sum(self, stage: int, *terms: Tensor, op_type: str = "AddN") -> Tensor:
        attrs = {"N": len(terms), "T": DType(terms[0].dtype)}
        found = self.build.one(op_type, terms, terms[0].shape, terms[0].dtype, attrs)
        return self.at(stage, found)

    def reduced(self, stage: int, op_type: str, *terms: Tensor, at: int | None = None) -> Tensor:
        """Of a Pack of them, which is in that stage too if `at` does not say another."""
        attrs = {"N": len(terms), "T": DType(terms[0].dtype), "axis": 0}
        shape = (len(terms), *terms[0].shape)
        pack = self.build.one("Pack", terms, shape, terms[0].dtype, attrs)
        self.at(stage if at is None else at, pack)
        return self.at(stage, self.build.reduce(op_type, pack, [0]))


def at_random(rng: np.random.Generator, num_stages: int) -> Arithmetic:
    """Sums, views, products and reductions of anything before; what nothing reads is returned."""
    made = Arithmetic()
    tensors = [made.source(int(s)) for s in rng.integers(num_stages, size=4)]

    def pick() -> Tensor:
        return tensors[int(rng.integers(max(0, len(tensors) - 8), len(tensors)))]

    for _ in range(int(rng.integers(4, 20))):
        stage = int(rng.integers(num_stages))
        kind = rng.choice(["add", "add", "add", "pair", "view", "neg", "max"])
        if kind == "add":
            new = made.sum(stage, *(pick() for _ in range(rng.integers(2, 5))))
        elif kind == "pair":
            new = made.sum(stage, pick(), pick(), op_type="AddV2")
        elif kind == "view":
            there = made.at(stage, made.build.reshape(pick(), (2, N // 2)))
            back = int(rng.integers(num_stages))
            new = made.at(back, made.build.reshape(made.sum(back, there, there), (N,)))
        elif kind == "neg":
            new = made.at(stage, made.build.unary("Neg", pick()))
        else:
            new = made.reduced(stage, "Max", *(pick() for _ in range(3)))
        tensors.append(new)
    read = made.graph.consumers()
    made.graph.outputs = [t for t in tensors if t not in read]
    made.graph.outputs += [t for t in tensors if t in read and rng.random() < 0.1]
    return made
