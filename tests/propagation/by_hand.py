"""Graphs written by hand, op by op, and what propagation makes of them. Free of TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

import tfpar.rules  # noqa: F401 - registers the rules
from tfpar.ir import DType, GraphBuilder, Op, Tensor, Variable
from tfpar.propagation.engine import begin, run_segment
from tfpar.propagation.partitioned_graph import Anchors, OpPlan
from tfpar.propagation.prepared_graph import PreparedGraph, prepare
from tfpar.propagation.state import PropagationState
from tfpar.propagation.step import visit
from tfpar.spec import Mesh, Spec, parse_spec

FLOAT = DType("float32")
PAIR = Mesh.of({"model": 2})
GRID = Mesh.of({"data": 2, "model": 2})


def specs(*texts: str) -> tuple[Spec, ...]:
    """Specs from their text: `S(0),R`, a placement for each mesh axis."""
    return tuple(map(parse_spec, texts))


class ByHand(GraphBuilder):
    """A builder with what steps are made of. Ops that are given a name are found under it."""

    def fed(self, name: str, *shape: int, dtype: str = "float32") -> Tensor:
        """An input of the graph."""
        (tensor,) = self.emit(
            "Placeholder", (), [(shape, dtype)], {"dtype": DType(dtype)}, name
        ).outputs
        self.graph.inputs.append(tensor)
        return tensor

    def variable(self, name: str, *shape: int, trainable: bool = True) -> Tensor:
        """The handle of a new variable."""
        attrs = {"dtype": DType("float32")}
        (handle,) = self.emit("Placeholder", (), [(shape, "resource")], attrs, f"{name}/h").outputs
        self.graph.variables.append(Variable(name, shape, "float32", trainable, handle))
        return handle

    def read(self, handle: Tensor) -> Tensor:
        return self.one("ReadVariableOp", (handle,), handle.shape, "float32", {"dtype": FLOAT})

    def weight(self, name: str, *shape: int) -> Tensor:
        """What is read of a new trainable variable."""
        return self.read(self.variable(name, *shape))

    def update(self, handle: Tensor, value: Tensor) -> Op:
        op = self.emit("AssignVariableOp", (handle, value), [], {"dtype": FLOAT}, stateful=True)
        self.graph.effects.append(op)
        return op

    def product(
        self, x: Tensor, y: Tensor, transpose: tuple[bool, bool] = (False, False)
    ) -> Tensor:
        rows, columns = x.shape[transpose[0]], y.shape[1 - transpose[1]]
        attrs = {"T": FLOAT, "transpose_a": transpose[0], "transpose_b": transpose[1]}
        return self.one("MatMul", (x, y), (rows, columns), "float32", attrs)

    def draw(self, *shape: int) -> Tensor:
        """Random numbers that nothing has said yet how to split."""
        key, counter = self.fed("key", 1, dtype="uint64"), self.fed("counter", 2, dtype="uint64")
        inputs = (self.shape_const(shape), key, counter, self.const(np.int32(1)))
        attrs = {"dtype": FLOAT, "Tshape": DType("int32")}
        return self.one("StatelessRandomUniformV2", inputs, shape, "float32", attrs)

    def prepared(self, *outputs: Tensor) -> PreparedGraph:
        self.graph.outputs = list(outputs)
        return prepare(self.graph)


def begun(
    prepared: PreparedGraph,
    mesh: Mesh,
    variables: Mapping[str, str] | None = None,
    inputs: Sequence[str] = (),
    tensors: Mapping[Tensor, str] | None = None,
    ops: Mapping[str, OpPlan] | None = None,
    **given,
) -> PropagationState:
    """The state before the first op; specs are given as text."""
    anchors = Anchors(
        variables={name: parse_spec(text) for name, text in (variables or {}).items()},
        inputs=specs(*inputs),
        tensors={tensor.name: parse_spec(text) for tensor, text in (tensors or {}).items()},
        ops=ops or {},
    )
    return begin(prepared, mesh, anchors, **given)


def before(op: Op, prepared: PreparedGraph, mesh: Mesh, *args, **given) -> PropagationState:
    """The state before `op`; other arguments are those of `begun`."""
    state = begun(prepared, mesh, *args, **given)
    for earlier in prepared.graph.ops[: prepared.position[op]]:
        visit(state, earlier)
    return state


def passed(prepared: PreparedGraph, mesh: Mesh, *args, **given) -> PropagationState:
    """The state behind the last op; arguments are those of `begun`."""
    state = begun(prepared, mesh, *args, **given)
    run_segment(state, prepared.graph.ops)
    return state


def moves(state: PropagationState) -> list[tuple[Tensor, Spec, Spec]]:
    """The reshards of a pass: (tensor, from, to)."""
    return [(r.tensor, r.source, r.target) for r in state.result.reshards]
