"""Mesh axis within a rank, beside those of the mesh: its parts are chunks, or microbatches.

A program written for a mesh with that axis becomes one for the ranks themselves. What is fed is
cut into blocks; what crosses the axis is arithmetic; and whoever uses this decides how the ops
between run: once for each part in one graph (`chunk_writer`), or as a function that is called once
for each (`microbatches`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfpar.compile.local.local_graph import LocalProgram, StagePass
from tfpar.compile.local.reshard import COLLECTIVE_TYPES
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import (
    DType,
    FunctionRef,
    Graph,
    Op,
    Tensor,
    is_floating,
    itemsize,
    walk_functions,
)
from tfpar.ir.traits import REPEATABLE, VARIABLE_READS
from tfpar.spec import Shard, local_shape, seen_rank

COMBINE = {
    "sum": "AddV2",
    "prod": "Mul",
    "max": "Maximum",
    "min": "Minimum",
    "any": "LogicalOr",
    "all": "LogicalAnd",
}
"""The op of two operands for each reduction."""

_WITHIN = {
    "AllReduce": "_reduced",
    "AllGather": "_joined",
    "ReduceScatter": "_scattered",
    "AllToAll": "_exchanged",
    "Broadcast": "_first",
}


class NotRepeatableError(Exception):
    """`op` has an effect or a state of its own, and would run once for each part of the batch."""

    def __init__(self, op: Op) -> None:
        super().__init__(op)
        self.op = op


class Repetition:
    """Properties of the ops of a program that matter when they run more than once.

    Args:
        program: its last mesh axis are the parts.
        made: where bodies of the new program go.
    """

    def __init__(self, program: LocalProgram, made: dict[str, Graph]) -> None:
        self._variables = program.graph.variable_of()
        parts = program.mesh.shape[-1]
        rank = seen_rank(program.mesh) // parts
        self.bodies = SubBatchBodies(program.graph.functions, made, parts, rank)

    def writes(self, op: Op) -> bool:
        """Whether `op` updates a variable, which all parts share."""
        return (
            op.type not in VARIABLE_READS
            and any(t in self._variables for t in op.inputs)
            and not self.bodies.of(op)
        )

    def has_effects(self, op: Op) -> bool:
        """Whether `op` would do more than compute: then once is not as good as once a part."""
        bodies = self.bodies.of(op)
        if bodies:
            return any(self.has_effects(inner) for body in bodies for inner in body.ops)
        return op.stateful and op.type not in REPEATABLE


class RankLocalAxis:
    """Writes a program without its last axis; each tensor of it becomes one for each part.

    Attributes:
        mesh: of the new program; `parts` of the old one's batch are those of a rank.
        tensors, ops: what each of the program's has become, by part.
        wholes: what inputs and variables have become.
        places: of the new program's ops, where the step is in stages.
    """

    def __init__(self, program: LocalProgram) -> None:
        self.program = program
        self.parts = program.mesh.shape[-1]
        self.mesh = program.mesh.without_last_axis()
        self.build = GraphBuilder(Graph(), rank=seen_rank(self.mesh))
        self.tensors: dict[Tensor, Sequence[Tensor]] = {}
        self.ops: dict[Op, Sequence[Op]] = {}
        self.wholes: dict[Tensor, Tensor] = {}
        self.places: dict[Op, StagePass] = {}
        self.repetition = Repetition(program, self.build.graph.functions)
        self._variables = program.graph.variable_of()

    def meets(self, op: Op) -> bool:
        """Whether `op` is a collective along the axis of the parts."""
        return op.type in COLLECTIVE_TYPES and self.mesh.num_axes in op.attrs["axes"]

    def finish(self, effects: Sequence[Op]) -> LocalProgram:
        """Return the program that has been written; `effects` are to run all the same."""
        old, graph = self.program, self.build.graph
        graph.inputs = [self.wholes[t] for t in old.graph.inputs]
        graph.variables = [
            dataclasses.replace(v, handle=self.wholes[v.handle]) for v in old.graph.variables
        ]
        graph.outputs = [self.tensors[t][0] for t in old.graph.outputs]
        graph.effects = list(dict.fromkeys(effects))
        return LocalProgram(
            graph,
            self.mesh,
            old.input_shapes,
            [s[:-1] for s in old.input_specs],
            [s[:-1] for s in old.output_specs],
            {name: s[:-1] for name, s in old.variable_specs.items()},
            self.places,
        )

    # --- sources -----------------------------------------------------------------

    def write_source(self, op: Op) -> None:
        """Write a variable's handle, or an input: whole for the rank, and cut for the parts."""
        (tensor,) = op.outputs
        variable = self._variables.get(tensor)
        shape, cut = tensor.shape, None
        if variable is None:
            at = self.program.graph.inputs.index(tensor)
            spec = self.program.input_specs[at]
            cut = spec[-1] if isinstance(spec[-1], Shard) else None
            if tensor.is_static:
                shape = local_shape(self.program.input_shapes[at], spec[:-1], self.mesh)
        clone = self.build.emit(op.type, (), [(shape, tensor.dtype)], op.attrs, name=op.name)
        (whole,) = clone.outputs
        self.wholes[tensor] = whole
        self.ops[op] = [clone] * self.parts
        self.tensors[tensor] = (
            [whole] * self.parts
            if cut is None
            else self._blocks(self._filled(whole, cut.dim, tensor.shape[cut.dim]), cut.dim)
        )

    def _filled(self, x: Tensor, dim: int, length: int) -> Tensor:
        """`x` as long along `dim` as parts of `length`; its last entry stands for what it lacks.

        As where ranks are fed: padded samples are real ones, and every reduction masks them.
        """
        size = list(x.shape)
        if size[dim] == length * self.parts:
            return x
        at = np.minimum(np.arange(length * self.parts), size[dim] - 1).astype(np.int32)
        size[dim] = len(at)
        attrs = {
            "Tparams": DType(x.dtype),
            "Tindices": DType("int32"),
            "Taxis": DType("int32"),
            "batch_dims": 0,
        }
        inputs = (x, self.build.const(at), self.build.const(np.int32(dim)))
        return self.build.one("GatherV2", inputs, size, x.dtype, attrs)

    # --- what crosses the axis ------------------------------------------------

    def write_crossing(self, op: Op) -> None:
        """Write a collective among parts, and ranks: the rank's share of it is arithmetic."""
        axes = tuple(a for a in op.attrs["axes"] if a != self.mesh.num_axes)
        within: Callable[[Op, Tensor], Sequence[Tensor]] = getattr(self, _WITHIN[op.type])
        made = [within(op, tensor) for tensor in op.inputs]
        if axes:
            attrs = {**op.attrs, "axes": axes}
            assert op.type in ("AllReduce", "Broadcast"), "others run over one axis at a time"
            inputs = [parts[0] for parts in made]
            outputs = [(t.shape, t.dtype) for t in op.outputs]
            met = self.build.emit(op.type, inputs, outputs, attrs, name=op.name)
            made = [[t] * self.parts for t in met.outputs]
        self.tensors.update(zip(op.outputs, made, strict=True))
        self.ops[op] = [tensor.op for tensor in made[-1]]

    def _reduced(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:
        combined = self.combined(tensor, op.attrs["reduction"])
        return [self.build.cast(combined, tensor.dtype)] * self.parts

    def combined(self, tensor: Tensor, reduction: str) -> Tensor:
        """Combine the parts of `tensor`, in the precision in which they were computed."""
        parts = self.tensors[tensor]
        if all(map(is_narrowed, parts)):  # for the wire, not for the sum
            parts = [part.op.inputs[0] for part in parts]
        combined, dtype = parts[0], parts[0].dtype
        if reduction == "sum":
            attrs = {"T": DType(dtype), "N": self.parts}
            return self.build.one("AddN", parts, tensor.shape, dtype, attrs)
        for part in parts[1:]:
            combined = self.build.binary(COMBINE[reduction], combined, part)
        return combined

    def _joined(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:
        return [self.build.concat(self.tensors[tensor], op.attrs["dims"][0])] * self.parts

    def _scattered(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:
        return self._blocks(self._reduced(op, tensor)[0], op.attrs["dims"][0])

    def _exchanged(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:
        (split_dim,), (concat_dim,) = op.attrs["split_dims"], op.attrs["concat_dims"]
        blocks = [self._blocks(part, split_dim) for part in self.tensors[tensor]]
        return [self.build.concat(parts, concat_dim) for parts in zip(*blocks, strict=True)]

    def _first(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:
        return [self.tensors[tensor][0]] * self.parts

    def _blocks(self, x: Tensor, dim: int) -> list[Tensor]:
        """The parts' equal blocks of `x` along `dim`."""
        size = list(x.shape)
        size[dim] //= self.parts
        begins = [[0] * len(size) for _ in range(self.parts)]
        for part, begin in enumerate(begins):
            begin[dim] = part * size[dim]
        return [self.build.slice(x, begin, size) for begin in begins]


def is_narrowed(tensor: Tensor) -> bool:
    """Whether `tensor` is of a shorter floating type than it was computed in."""
    if tensor.op.type != "Cast":
        return False
    dtypes = (tensor.op.inputs[0].dtype, tensor.dtype)
    return all(map(is_floating, dtypes)) and itemsize(dtypes[0]) > itemsize(dtypes[1])


# --- bodies ---------------------------------------------------------------------------------


class SubBatchBodies:
    """Bodies of loops, branches and calls: one for each part where constants differ.

    Args:
        functions: bodies of the program whose last mesh axis are the parts.
        made: where those of the new one go.
        rank: of the new one, whose shapes its tensors have; see `GraphBuilder`.
    """

    def __init__(
        self, functions: dict[str, Graph], made: dict[str, Graph], parts: int, rank: int = 0
    ) -> None:
        self._functions = functions
        self._made = made
        self._parts = parts
        self._rank = rank

    def of(self, op: Op) -> list[Graph]:
        """Return the bodies that `op` names."""
        return [body for _, body in walk_functions(Graph(functions=self._functions), op)]

    def differ(self, op: Op) -> bool:
        """Whether the bodies of `op` hold constants of ranks, which parts may differ in."""
        return any(
            inner.type == "RankConst" or self.differ(inner)
            for body in self.of(op)
            for inner in body.ops
        )

    def attrs(self, op: Op, part: int) -> dict[str, Any]:
        """Return the attributes of `op` for a part, naming its bodies there."""
        if not self.of(op):
            return op.attrs
        suffix = f"_part{part}" if part and self.differ(op) else ""
        return {key: self._renamed(value, part, suffix) for key, value in op.attrs.items()}

    def _renamed(self, value: Any, part: int, suffix: str) -> Any:
        if isinstance(value, list):
            return [self._renamed(v, part, suffix) for v in value]
        if not isinstance(value, FunctionRef):
            return value
        name = FunctionRef(value + suffix)
        if name not in self._made:
            self._made[name] = self._body(self._functions[value], part)
        return name

    def _body(self, body: Graph, part: int) -> Graph:
        """A copy of `body` for one part."""
        build = GraphBuilder(Graph(functions=self._made), rank=self._rank)
        tensors: dict[Tensor, Tensor] = {}
        ops: dict[Op, Op] = {}
        for op in body.ops:
            if op.type == "RankConst":
                build.name = op.name
                values = constant_of_sub_batch(op, part, self._parts)
                clone = build.per_rank(values, op.outputs[0].dtype).op
            else:
                clone = build.emit(
                    op.type,
                    [tensors[t] for t in op.inputs],
                    [(t.shape, t.dtype) for t in op.outputs],
                    self.attrs(op, part),
                    op.name,
                    [ops[c] for c in op.control],
                    op.stateful,
                )
            ops[op] = clone
            tensors.update(zip(op.outputs, clone.outputs, strict=True))
        graph = build.graph
        graph.inputs = [tensors[t] for t in body.inputs]
        graph.outputs = [tensors[t] for t in body.outputs]
        graph.effects = [ops[e] for e in body.effects]
        return graph


def constant_of_sub_batch(op: Op, part: int, parts: int) -> list[np.ndarray]:
    """Return the values of a constant that differs by rank, for one part of each rank of the
    mesh."""
    values: list[np.ndarray] = op.attrs["values"]
    return values[part::parts]
