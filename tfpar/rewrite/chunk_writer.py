"""Writing a program with chunks as one for ranks: what runs once, and what once for each chunk."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import DType, Graph, Op, Tensor, is_floating, itemsize
from tfpar.ir.traits import REPEATABLE, VARIABLE_READS
from tfpar.rewrite.chunk_bodies import ChunkBodies, of_chunk
from tfpar.rewrite.local_graph import LocalProgram
from tfpar.rewrite.reshard import CHUNK, COLLECTIVE_TYPES, ONCE
from tfpar.spec import Mesh, Shard, local_shape

_COMBINE = {
    "prod": "Mul",
    "max": "Maximum",
    "min": "Minimum",
    "any": "LogicalOr",
    "all": "LogicalAnd",
}

_WITHIN = {
    "AllReduce": "_reduced",
    "AllGather": "_joined",
    "ReduceScatter": "_scattered",
    "AllToAll": "_exchanged",
    "Broadcast": "_first",
}


class CannotChunk(Exception):
    """`op` has an effect or a state of its own, and would run once for each chunk."""

    def __init__(self, op: Op) -> None:
        super().__init__(op)
        self.op = op


class ChunkWriter:
    """Emits the ops of a program with chunks; each tensor of it becomes one for each chunk.

    Attributes:
        tensors, ops: what each of the program's has become, by chunk.
        wholes: what inputs and variables have become.
        runs_for: the chunks for which a new op runs, where that is not all of them.
    """

    def __init__(self, program: LocalProgram) -> None:
        self.program = program
        *names, _ = program.mesh.axis_names
        *sizes, self.chunks = program.mesh.shape
        self.mesh = Mesh(tuple(names), tuple(sizes))
        self.build = GraphBuilder(Graph())
        self.tensors: dict[Tensor, Sequence[Tensor]] = {}
        self.ops: dict[Op, Sequence[Op]] = {}
        self.wholes: dict[Tensor, Tensor] = {}
        self.runs_for: dict[Op, frozenset[int]] = {}
        self._variables = program.graph.variable_of()
        self._bodies = ChunkBodies(program.graph.functions, self.build.graph.functions, self.chunks)

    def write(self, op: Op) -> None:
        self.build.name = op.name
        if op.type == "Placeholder":
            self._source(op)
        elif op.type in COLLECTIVE_TYPES and self.mesh.num_axes in op.attrs["axes"]:
            self._across(op)
        else:
            self._clone(op)

    # --- sources -----------------------------------------------------------------

    def _source(self, op: Op) -> None:
        """A variable's handle, or an input: whole for the rank, and cut for the chunks."""
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
        self.ops[op] = [clone] * self.chunks
        self.tensors[tensor] = (
            [whole] * self.chunks
            if cut is None
            else self._blocks(self._filled(whole, cut.dim, tensor.shape[cut.dim]), cut.dim)
        )

    def _filled(self, x: Tensor, dim: int, length: int) -> Tensor:
        """`x` as long along `dim` as chunks of `length`; its last entry stands for what it lacks.

        As where ranks are fed: padded samples are real ones, and every reduction masks them.
        """
        size = list(x.shape)
        if size[dim] == length * self.chunks:
            return x
        at = np.minimum(np.arange(length * self.chunks), size[dim] - 1).astype(np.int32)
        size[dim] = len(at)
        attrs = {
            "Tparams": DType(x.dtype),
            "Tindices": DType("int32"),
            "Taxis": DType("int32"),
            "batch_dims": 0,
        }
        inputs = (x, self.build.const(at), self.build.const(np.int32(dim)))
        return self.build.one("GatherV2", inputs, size, x.dtype, attrs)

    # --- ops of a chunk -----------------------------------------------------------

    def _clone(self, op: Op) -> None:
        """Once for each chunk, or for several that would run it on the same tensors."""
        groups: dict[Hashable, list[int]] = {}
        for chunk in range(self.chunks):
            groups.setdefault(self._key(op, chunk), []).append(chunk)
        if len(groups) > 1 and self._has_effects(op):
            raise CannotChunk(op)
        made: list[Op] = [op] * self.chunks
        for members in groups.values():
            clone = self._emit(op, members[0], alone=len(groups) == 1)
            if len(groups) > 1:
                self.runs_for[clone] = frozenset(members)
            before = (self.ops[c][chunk] for c in op.control for chunk in members)
            clone.control = list(dict.fromkeys(before))
            for chunk in members:
                made[chunk] = clone
        self.ops[op] = made
        for i, tensor in enumerate(op.outputs):
            self.tensors[tensor] = [clone.outputs[i] for clone in made]

    def _key(self, op: Op, chunk: int) -> Hashable:
        """Equal for chunks that `op` runs for once."""
        if op.type == "RankConst":
            return tuple(np.asarray(v).tobytes() for v in of_chunk(op, chunk, self.chunks))
        if ONCE in op.attrs or self._writes(op):
            return None  # chunks hold the same, even where each has computed it
        inputs = tuple(self.tensors[t][chunk] for t in op.inputs)
        return inputs, chunk if self._bodies.differ(op) else None

    def _writes(self, op: Op) -> bool:
        """Whether `op` updates a variable, which all chunks share."""
        return (
            op.type not in VARIABLE_READS
            and any(t in self._variables for t in op.inputs)
            and not self._bodies.of(op)
        )

    def _has_effects(self, op: Op) -> bool:
        """Whether `op` would do more than compute: then once is not as good as once a chunk."""
        bodies = self._bodies.of(op)
        if bodies:
            return any(self._has_effects(inner) for body in bodies for inner in body.ops)
        return op.stateful and op.type not in REPEATABLE

    def _emit(self, op: Op, chunk: int, alone: bool) -> Op:
        name = f"{op.name}/chunk{chunk}" if chunk else op.name
        outputs = [(t.shape, t.dtype) for t in op.outputs]
        if op.type == "RankConst":
            values = of_chunk(op, chunk, self.chunks)
            return self.build.per_rank(values, op.outputs[0].dtype).op
        attrs = self._bodies.attrs(op, chunk)
        if not alone and op.type in COLLECTIVE_TYPES:
            attrs = {**attrs, CHUNK: chunk}
        inputs = [self.tensors[t][chunk] for t in op.inputs]
        return self.build.emit(op.type, inputs, outputs, attrs, name, stateful=op.stateful)

    # --- what crosses the chunk axis ------------------------------------------------

    def _across(self, op: Op) -> None:
        """A collective among chunks, and ranks: the rank's share of it is arithmetic."""
        axes = tuple(a for a in op.attrs["axes"] if a != self.mesh.num_axes)
        within: Callable[[Op, Tensor], Sequence[Tensor]] = getattr(self, _WITHIN[op.type])
        made = [within(op, tensor) for tensor in op.inputs]
        if axes:
            attrs = {**op.attrs, "axes": axes}
            assert op.type in ("AllReduce", "Broadcast"), "others run over one axis at a time"
            inputs = [parts[0] for parts in made]
            outputs = [(t.shape, t.dtype) for t in op.outputs]
            met = self.build.emit(op.type, inputs, outputs, attrs, name=op.name)
            made = [[t] * self.chunks for t in met.outputs]
        self.tensors.update(zip(op.outputs, made, strict=True))
        self.ops[op] = [tensor.op for tensor in made[-1]]

    def _reduced(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:
        parts, reduction = self.tensors[tensor], op.attrs["reduction"]
        if all(map(_is_narrowed, parts)):  # for the wire, not for the sum
            parts = [part.op.inputs[0] for part in parts]
        combined, dtype = parts[0], parts[0].dtype
        if reduction == "sum":
            attrs = {"T": DType(dtype), "N": self.chunks}
            combined = self.build.one("AddN", parts, tensor.shape, dtype, attrs)
        else:
            for part in parts[1:]:
                combined = self.build.binary(_COMBINE[reduction], combined, part)
        return [self.build.cast(combined, tensor.dtype)] * self.chunks

    def _joined(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:
        return [self.build.concat(self.tensors[tensor], op.attrs["dims"][0])] * self.chunks

    def _scattered(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:
        return self._blocks(self._reduced(op, tensor)[0], op.attrs["dims"][0])

    def _exchanged(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:
        (split_dim,), (concat_dim,) = op.attrs["split_dims"], op.attrs["concat_dims"]
        blocks = [self._blocks(part, split_dim) for part in self.tensors[tensor]]
        return [self.build.concat(parts, concat_dim) for parts in zip(*blocks, strict=True)]

    def _first(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:
        return [self.tensors[tensor][0]] * self.chunks

    def _blocks(self, x: Tensor, dim: int) -> list[Tensor]:
        """The chunks' equal blocks of `x` along `dim`."""
        size = list(x.shape)
        size[dim] //= self.chunks
        begins = [[0] * len(size) for _ in range(self.chunks)]
        for chunk, begin in enumerate(begins):
            begin[dim] = chunk * size[dim]
        return [self.build.slice(x, begin, size) for begin in begins]


def _is_narrowed(tensor: Tensor) -> bool:
    """Whether `tensor` is of a shorter floating type than it was computed in."""
    if tensor.op.type != "Cast":
        return False
    dtypes = (tensor.op.inputs[0].dtype, tensor.dtype)
    return all(map(is_floating, dtypes)) and itemsize(dtypes[0]) > itemsize(dtypes[1])
