"""Chunks: a rank computes its part of the batch in a few pieces, one behind the other (ATP §4.1).

A chunk is a rank along one more mesh axis, the minor one, that lies within a rank. Propagation and
the rewriter know nothing of that: they make the program of the mesh with that axis. Here it
becomes one for the mesh itself: every op runs once for each chunk, unless the chunks would all
run it on the same tensors; what crosses the chunk axis is arithmetic within the rank; and what
crosses ranks goes once for each chunk, so that one chunk computes while another's is in flight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import numpy as np

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import (
    VARIABLE_READS,
    DType,
    FunctionRef,
    Graph,
    Op,
    Tensor,
    is_floating,
    itemsize,
    walk_functions,
)
from tfpar.ir.order import sort_topologically
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import Anchors, PartitionedGraph
from tfpar.rewrite.local_graph import LocalProgram, build_local_program
from tfpar.rewrite.reshard import CHUNK, COLLECTIVE_TYPES, ONCE
from tfpar.rewrite.stagger import stagger
from tfpar.spec import Mesh, Replicate, Shard, local_shape

CHUNKS = (1, 2, 4)
"""How many there may be: more are too small to compute and to send efficiently (ATP §4.1)."""

_COMBINE = {
    "prod": "Mul", "max": "Maximum", "min": "Minimum", "any": "LogicalOr", "all": "LogicalAnd",
}  # fmt: skip


class CannotChunk(Exception):
    """`op` has an effect or a state of its own, and would run once for each chunk."""

    def __init__(self, op: Op) -> None:
        super().__init__(op)
        self.op = op


def with_chunks(mesh: Mesh, chunks: int) -> Mesh:
    """`mesh` with the axis of the chunks behind its own."""
    name = "chunk"
    while name in mesh.axis_names:
        name += "_"
    return Mesh((*mesh.axis_names, name), (*mesh.shape, chunks))


def build_chunked_program(
    partitioned: PartitionedGraph, anchors: Anchors, batched: Collection[Tensor], chunks: int
) -> LocalProgram:
    """The program of a partitioned graph with the batch in chunks.

    Variables lie as without, and inputs are fed alike. A loop or branch whose body has an effect
    cannot run on chunks: its effect would come more than once.

    Args:
        partitioned: the graph without chunks, from `anchors`.
        batched: the inputs of which each chunk gets a part.

    Raises:
        CannotChunk: names the op.
    """
    mesh = with_chunks(partitioned.mesh, chunks)
    laid = propagate(partitioned.prepared, mesh, chunked_anchors(partitioned, anchors, batched))
    laid.carried = partitioned.carried
    return run_chunks(build_local_program(laid))


def chunked_anchors(
    partitioned: PartitionedGraph, anchors: Anchors, batched: Collection[Tensor]
) -> Anchors:
    """What propagation with chunks starts from: variables as they lie, `batched` inputs cut.

    Args:
        partitioned: the same step without chunks, from `anchors`.
    """
    return Anchors(
        variables={v.name: (*s, Replicate()) for v, s in partitioned.variable_specs.items()},
        inputs=[
            (*spec, Shard(0) if tensor in batched else Replicate())
            for tensor, spec in zip(partitioned.graph.inputs, anchors.inputs, strict=True)
        ],
        tensors=anchors.tensors,
        outputs=[(*s, Replicate()) for s in partitioned.output_specs],
    )


def run_chunks(program: LocalProgram) -> LocalProgram:
    """The program for the mesh without its last axis, whose ranks are chunks within a rank.

    Raises:
        CannotChunk: names an op that must not run once for each chunk.
    """
    _sum_before_scattering(program.graph, (program.mesh.num_axes - 1,))
    writer = _Writer(program)
    for op in program.graph.ops:
        writer.write(op)
    graph = writer.build.graph
    graph.inputs = [writer.wholes[t] for t in program.graph.inputs]
    graph.variables = [
        dataclasses.replace(v, handle=writer.wholes[v.handle]) for v in program.graph.variables
    ]
    graph.outputs = [writer.tensors[t][0] for t in program.graph.outputs]
    graph.effects = list(dict.fromkeys(e for op in program.graph.effects for e in writer.ops[op]))
    stagger(graph, writer.runs_for, writer.chunks)
    return LocalProgram(
        graph,
        writer.mesh,
        program.input_shapes,
        [s[:-1] for s in program.input_specs],
        [s[:-1] for s in program.output_specs],
        {name: s[:-1] for name, s in program.variable_specs.items()},
    )


def _sum_before_scattering(graph: Graph, axes: tuple[int, ...]) -> None:
    """Sum over `axes`, the chunks, before what is summed is scattered over ranks; in place.

    Among ranks scattering first leaves less to sum. Within a rank sums move nothing, and then one
    is scattered instead of one for each chunk.
    """
    readers = graph.consumers()
    moved: dict[Tensor, Tensor] = {}
    for op in graph.ops:
        if op.type != "AllReduce" or op.attrs["axes"] != axes:
            continue
        (scattered,) = op.inputs
        while scattered.op.type == "Reshape" and len(readers[scattered]) == 1:
            scattered = scattered.op.inputs[0]
        scatter = scattered.op
        if (
            scatter.type == "ReduceScatter"
            and scatter.attrs["reduction"] == op.attrs["reduction"]
            and len(readers[scattered]) == 1
        ):
            (result,) = op.outputs
            moved[result] = op.inputs[0]
            op.inputs, op.outputs = list(scatter.inputs), []
            scatter.inputs = [op.add_output(op.inputs[0].shape, result.dtype)]
    if moved:
        for op in graph.ops:
            op.inputs = [moved.get(t, t) for t in op.inputs]
        graph.outputs = [moved.get(t, t) for t in graph.outputs]
        graph.ops = sort_topologically(graph.ops)


class _Writer:
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
        self._bodies = _Bodies(program.graph.functions, self.build.graph.functions, self.chunks)

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
            "Tparams": DType(x.dtype), "Tindices": DType("int32"), "Taxis": DType("int32"),
            "batch_dims": 0,
        }  # fmt: skip
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
            clone = self._emit(op, members[0], of_chunk=len(groups) > 1)
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
            return tuple(np.asarray(v).tobytes() for v in _of_chunk(op, chunk, self.chunks))
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
        return op.stateful and op.type not in VARIABLE_READS

    def _emit(self, op: Op, chunk: int, of_chunk: bool) -> Op:
        name = f"{op.name}/chunk{chunk}" if chunk else op.name
        outputs = [(t.shape, t.dtype) for t in op.outputs]
        if op.type == "RankConst":
            values = _of_chunk(op, chunk, self.chunks)
            return self.build.per_rank(values, op.outputs[0].dtype).op
        attrs = self._bodies.attrs(op, chunk)
        if of_chunk and op.type in COLLECTIVE_TYPES:
            attrs = {**attrs, CHUNK: chunk}
        inputs = [self.tensors[t][chunk] for t in op.inputs]
        return self.build.emit(op.type, inputs, outputs, attrs, name, stateful=op.stateful)

    # --- what crosses the chunk axis ------------------------------------------------

    def _across(self, op: Op) -> None:
        """A collective among chunks, and ranks: the rank's share of it is arithmetic."""
        axes = tuple(a for a in op.attrs["axes"] if a != self.mesh.num_axes)
        crossed: Callable[[Op, Tensor], Sequence[Tensor]] = getattr(self, f"_{op.type}")
        made = [crossed(op, tensor) for tensor in op.inputs]
        if axes:
            attrs = {**op.attrs, "axes": axes}
            assert op.type in ("AllReduce", "Broadcast"), "others run over one axis at a time"
            inputs = [parts[0] for parts in made]
            outputs = [(t.shape, t.dtype) for t in op.outputs]
            met = self.build.emit(op.type, inputs, outputs, attrs, name=op.name)
            made = [[t] * self.chunks for t in met.outputs]
        self.tensors.update(zip(op.outputs, made, strict=True))
        self.ops[op] = [parts.op for parts in made[-1]]

    def _AllReduce(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:  # noqa: N802 - an op type
        parts, reduction = self.tensors[tensor], op.attrs["reduction"]
        if all(map(_is_narrowed, parts)):  # to be carried so, not to be summed so
            parts = [part.op.inputs[0] for part in parts]
        combined, dtype = parts[0], parts[0].dtype
        if reduction == "sum":
            attrs = {"T": DType(dtype), "N": self.chunks}
            combined = self.build.one("AddN", parts, tensor.shape, dtype, attrs)
        else:
            for part in parts[1:]:
                combined = self.build.binary(_COMBINE[reduction], combined, part)
        return [self.build.cast(combined, tensor.dtype)] * self.chunks

    def _AllGather(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:  # noqa: N802
        return [self.build.concat(self.tensors[tensor], op.attrs["dim"])] * self.chunks

    def _ReduceScatter(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:  # noqa: N802
        return self._blocks(self._AllReduce(op, tensor)[0], op.attrs["dim"])

    def _AllToAll(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:  # noqa: N802
        blocks = [self._blocks(part, op.attrs["split_dim"]) for part in self.tensors[tensor]]
        return [
            self.build.concat(parts, op.attrs["concat_dim"]) for parts in zip(*blocks, strict=True)
        ]

    def _Broadcast(self, op: Op, tensor: Tensor) -> Sequence[Tensor]:  # noqa: N802
        return [self.tensors[tensor][0]] * self.chunks

    def _blocks(self, x: Tensor, dim: int) -> list[Tensor]:
        """The chunks' equal blocks of `x` along `dim`."""
        size = list(x.shape)
        size[dim] //= self.chunks
        begins = [[0] * len(size) for _ in range(self.chunks)]
        for chunk, begin in enumerate(begins):
            begin[dim] = chunk * size[dim]
        return [self.build.slice(x, begin, size) for begin in begins]


class _Bodies:
    """Bodies of loops, branches and calls: one for each chunk where constants differ.

    Args:
        functions: bodies of the program with chunks.
        made: where those of the new one go.
    """

    def __init__(self, functions: dict[str, Graph], made: dict[str, Graph], chunks: int) -> None:
        self._functions = functions
        self._made = made
        self._chunks = chunks

    def of(self, op: Op) -> list[Graph]:
        """The bodies that `op` names."""
        return [body for _, body in walk_functions(Graph(functions=self._functions), op)]

    def differ(self, op: Op) -> bool:
        """Whether the bodies of `op` hold constants of ranks, which chunks may differ in."""
        return any(
            inner.type == "RankConst" or self.differ(inner)
            for body in self.of(op)
            for inner in body.ops
        )

    def attrs(self, op: Op, chunk: int) -> dict[str, Any]:
        """The attributes of `op` for a chunk, naming its bodies there."""
        if not self.of(op):
            return op.attrs
        suffix = f"_chunk{chunk}" if chunk and self.differ(op) else ""
        return {key: self._renamed(value, chunk, suffix) for key, value in op.attrs.items()}

    def _renamed(self, value: Any, chunk: int, suffix: str) -> Any:
        if isinstance(value, list):
            return [self._renamed(v, chunk, suffix) for v in value]
        if not isinstance(value, FunctionRef):
            return value
        name = FunctionRef(value + suffix)
        if name not in self._made:
            self._made[name] = self._body(self._functions[value], chunk)
        return name

    def _body(self, body: Graph, chunk: int) -> Graph:
        """A copy of `body` for one chunk."""
        build = GraphBuilder(Graph(functions=self._made))
        tensors: dict[Tensor, Tensor] = {}
        ops: dict[Op, Op] = {}
        for op in body.ops:
            if op.type == "RankConst":
                build.name = op.name
                values = _of_chunk(op, chunk, self._chunks)
                clone = build.per_rank(values, op.outputs[0].dtype).op
            else:
                clone = build.emit(
                    op.type, [tensors[t] for t in op.inputs],
                    [(t.shape, t.dtype) for t in op.outputs], self.attrs(op, chunk), op.name,
                    [ops[c] for c in op.control], op.stateful,
                )  # fmt: skip
            ops[op] = clone
            tensors.update(zip(op.outputs, clone.outputs, strict=True))
        graph = build.graph
        graph.inputs = [tensors[t] for t in body.inputs]
        graph.outputs = [tensors[t] for t in body.outputs]
        graph.effects = [ops[e] for e in body.effects]
        return graph


def _is_narrowed(tensor: Tensor) -> bool:
    """Whether `tensor` is a number in a shorter type than it was computed in."""
    if tensor.op.type != "Cast":
        return False
    (source,) = tensor.op.inputs
    return is_floating(source.dtype) and itemsize(tensor.dtype) < itemsize(source.dtype)


def _of_chunk(op: Op, chunk: int, chunks: int) -> list[np.ndarray]:
    """What a constant of ranks is for the ranks of the mesh, in one of their chunks."""
    return op.attrs["values"][chunk::chunks]
