"""The IR: one snapshot of a step as ops and tensors with static shapes.

A `Graph` lists its ops in a topological order. Resource tensors (variable
handles) carry the shape and dtype of their variable, and variants that
hold tensor lists the shape `(length, *element)`, so op rules can speak of their
dimensions like those of any tensor; a length may be unknown (None) and is never split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tfpar.spec.names import ITEMSIZES

Shape = tuple[Any, ...] | Any
"""Static shape: None for an unknown rank, a None entry for an unknown size.

`Any` for the type checker: rules and everything after them see static shapes only.
"""


class DType(str):
    """An attribute value that names a dtype (`DType("float32")`)."""

    __slots__ = ()


class ShapeAttr(tuple[int, ...]):
    """An attribute value that is a shape of known rank; unknown sizes are -1."""

    __slots__ = ()


class UnknownShape:
    """An attribute value: a shape of unknown rank."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnknownShape)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "UnknownShape()"


class FunctionRef(str):
    """An attribute value that names a function of `Graph.functions`."""

    __slots__ = ()


class Tensor:
    """An output of an op. `shape` and `dtype` are static and global."""

    __slots__ = ("dtype", "index", "op", "shape")

    def __init__(self, op: Op, index: int, shape: Shape, dtype: str) -> None:
        self.op = op
        self.index = index
        self.shape = shape
        self.dtype = dtype

    @property
    def name(self) -> str:
        return f"{self.op.name}:{self.index}"

    @property
    def is_static(self) -> bool:
        """Whether every size is known; the length of a tensor list need not be."""
        if self.shape is None:
            return False
        return None not in (self.shape[1:] if self.dtype == "variant" else self.shape)

    @property
    def num_elements(self) -> int:
        """Product of the static shape; unknown sizes count as 1."""
        size = 1
        for n in self.shape or ():
            size *= 1 if n is None else n
        return size

    @property
    def num_bytes(self) -> int:
        return self.num_elements * itemsize(self.dtype)

    def __repr__(self) -> str:
        return f"<{self.name} {self.dtype}{self.shape}>"


class Op:
    """One operation.

    Attributes:
        name: unique in its graph; the part before the last `/` is its name scope.
        type: TensorFlow's op type, or one of tfpar's own (collectives, `RankConst`).
        inputs: data inputs.
        control: ops that must run before this one.
        attrs: attribute values as Python values (see `DType` and its kin); a
            Const holds its numpy value under `value`.
        stateful: TensorFlow's mark of ops with effects or hidden state.
    """

    __slots__ = ("attrs", "control", "inputs", "name", "outputs", "stateful", "type")

    def __init__(
        self,
        name: str,
        type: str,
        inputs: Iterable[Tensor] = (),
        attrs: dict[str, Any] | None = None,
        control: Iterable[Op] = (),
        stateful: bool = False,
    ) -> None:
        self.stateful = stateful
        self.name = name
        self.type = type
        self.inputs = list(inputs)
        self.attrs = attrs if attrs is not None else {}
        self.control = list(control)
        self.outputs: list[Tensor] = []

    def add_output(self, shape: Shape, dtype: str) -> Tensor:
        tensor = Tensor(self, len(self.outputs), shape, dtype)
        self.outputs.append(tensor)
        return tensor

    @property
    def scope(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def predecessors(self) -> list[Op]:
        """Ops that run before it: those that make its inputs, and those it waits for otherwise."""
        return [*(t.op for t in self.inputs), *self.control]

    def __repr__(self) -> str:
        return f"<{self.type} {self.name}>"


@dataclasses.dataclass(eq=False)
class Variable:
    """A variable of the step.

    Attributes:
        name: unique; for a Keras variable its path (`dense/kernel`).
        trainable: whether the framework counts it as a weight (an optimizer slot
            or a metric is not).
        handle: the resource tensor by which the graph's ops know it.
        place: where in its model it is, where that is known; see `ir.names`.
        offloaded: of an optimizer slot: it is in the memory of the host; of a weight: its slots do
            (see `ir.passes.slots`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    handle: Tensor
    place: str = ""
    offloaded: bool = False

    @property
    def on_host(self) -> bool:
        """Whether it is itself in the memory of the host."""
        return self.offloaded and not self.trainable

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * itemsize(self.dtype)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """Input of the optimizer for one weight: its gradient, or the rows of a sparse one.

    Attributes:
        variable: the weight's name.
        indices: the rows of the weight that `values` are for; None for a dense gradient.
    """

    variable: str
    values: Tensor
    indices: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,) if self.indices is None else (self.values, self.indices)


@dataclasses.dataclass(eq=False)
class Graph:
    """Ops in topological order, what enters, what leaves, and the variables.

    Attributes:
        inputs: outputs of `Placeholder` ops that are fed, in feeding order.
        outputs: tensors that are returned.
        variables: every variable, in capture order.
        functions: bodies of control flow and calls, by name.
        effects: ops that must run although nothing reads them.
    """

    ops: list[Op] = dataclasses.field(default_factory=list)
    inputs: list[Tensor] = dataclasses.field(default_factory=list)
    outputs: list[Tensor] = dataclasses.field(default_factory=list)
    variables: list[Variable] = dataclasses.field(default_factory=list)
    functions: dict[str, Graph] = dataclasses.field(default_factory=dict)
    effects: list[Op] = dataclasses.field(default_factory=list)

    def consumers(self) -> dict[Tensor, list[Op]]:
        """Return the ops that read each tensor, once per op, in graph order."""
        readers: dict[Tensor, list[Op]] = {}
        for op in self.ops:
            for tensor in dict.fromkeys(op.inputs):
                readers.setdefault(tensor, []).append(op)
        return readers

    def variable_of(self) -> dict[Tensor, Variable]:
        return {v.handle: v for v in self.variables}

    def __str__(self) -> str:
        """The graph as text; see `tfpar.ir.text`."""
        from tfpar.ir.text import format_graph  # which is made of graphs

        return format_graph(self)


def walk_functions(graph: Graph, op: Op) -> Iterator[tuple[str, Graph]]:
    """(attribute, body) for each function that `op` names."""
    for key, value in op.attrs.items():
        for ref in function_refs(value):
            yield key, graph.functions[ref]


def function_refs(*values: Any) -> Iterator[FunctionRef]:
    """Yield the names of functions among attribute values, and in lists of these."""
    for value in values:
        if isinstance(value, list):
            yield from function_refs(*value)
        elif isinstance(value, FunctionRef):
            yield value


def renamed_functions(value: Any, names: Mapping[Any, Any]) -> Any:
    """Return an attribute value with other names of functions, of those that are in `names`."""
    if isinstance(value, list):
        return [renamed_functions(v, names) for v in value]
    return names.get(value, value) if isinstance(value, FunctionRef) else value


def itemsize(dtype: str) -> int:
    """Return the bytes per element; 0 for dtypes that hold no plain numbers (string, variant)."""
    return ITEMSIZES.get(dtype, 0)


def is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "half"))


def is_numeric(dtype: str) -> bool:
    return dtype in ITEMSIZES and dtype != "bool"


def freeze(value: Any) -> Any:
    """Return a hashable stand-in for an attribute value."""
    if isinstance(value, np.ndarray):
        return ("ndarray", value.shape, value.dtype.str, value.tobytes())
    if isinstance(value, list):
        return ("list", *map(freeze, value))
    return (type(value).__name__, value)
