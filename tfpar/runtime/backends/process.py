"""One rank a process: a local program with its collectives on a transport."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfpar.ir.graph import DType, Op, Tensor
from tfpar.rewrite.local_graph import LocalProgram
from tfpar.rewrite.reshard import COLLECTIVE_TYPES, ONCE
from tfpar.runtime.backends.linker import Linker
from tfpar.runtime.backends.transport import Transport
from tfpar.runtime.backends.wire import Operand, Wire
from tfpar.runtime.function_def import RegisteredFunction, serialize_attrs
from tfpar.spec import Spec


class ProcessProgram:
    """A local program linked for the one rank that this process is.

    Call it as an `InProcessProgram`; inputs are this rank's parts where it is fed in parts.

    Attributes:
        holders: per variable, for each rank the rank whose shard it uses: its own.
        function: the same on every rank: constants in which ranks differ are arguments. Were
            they inside, TensorFlow could fold a collective away on one rank alone.
    """

    def __init__(
        self, program: LocalProgram, devices: Sequence[str], transport: Transport,
        fed_in_parts: bool = False, name: str = "tfpar",
    ) -> None:  # fmt: skip
        self.program = program
        self.rank = transport.rank
        ranks = tuple(range(program.mesh.size))
        self.holders = [ranks for _ in program.graph.variables]
        transport.connect(groups_of(program))
        linker = _Linker(program, devices, transport, self.holders, fed_in_parts, name)
        self.function: RegisteredFunction = linker.link()
        with tf.device("CPU:0"):
            self._constants = [tf.constant(value) for value in linker.constants]

    def __call__(
        self, inputs: Sequence[tf.Tensor], handles: Sequence[Mapping[int, tf.Tensor]]
    ) -> list[tf.Tensor]:
        own = [shards[self.rank] for shards in handles]
        return self.function([*inputs, *own, *self._constants])


def groups_of(program: LocalProgram) -> list[tuple[int, ...]]:
    """The groups in which the program's collectives run, in their order."""
    axes = dict.fromkeys(
        op.attrs["axes"] for op in program.graph.ops if op.type in COLLECTIVE_TYPES
    )
    return list(dict.fromkeys(g for a in axes for g in program.mesh.groups(a) if len(g) > 1))


def outline(program: LocalProgram) -> list[tuple[str, int]]:
    """Name and checksum of every op, in order; the same on every rank that runs `program`."""
    return [
        (op.name, zlib.crc32(repr((op.type, _described(op), _shapes(op))).encode()))
        for op in program.graph.ops
    ]


def _described(op: Op) -> list[tuple[str, str]]:
    if op.type in ("Const", "RankConst"):  # those that matter are in the shapes around them
        return []
    return sorted((key, repr(value)) for key, value in op.attrs.items())


def _shapes(op: Op) -> list[tuple]:
    return [(t.shape, t.dtype) for t in (*op.inputs, *op.outputs)]


class _Linker(Linker):
    """One rank."""

    def __init__(
        self, program: LocalProgram, devices: Sequence[str], transport: Transport,
        variable_holders: Sequence[Sequence[int]], fed_in_parts: bool, name: str,
    ) -> None:  # fmt: skip
        super().__init__(program, devices, [transport.rank], variable_holders, name)
        self._fed_in_parts = fed_in_parts
        self.rank = transport.rank
        self.constants: list[np.ndarray] = []
        self._wire = Wire(self.writer, transport)

    def _feed(
        self, name: str, whole: str, tensor: Tensor, shape: Sequence[int], spec: Spec, rank: int
    ) -> str:
        if self._fed_in_parts:  # then it is this rank's part already
            return whole
        return super()._feed(name, whole, tensor, shape, spec, rank)

    def _rank_constant(self, name: str, values: Sequence[np.ndarray], dtype: str, rank: int) -> str:
        argument = f"const{len(self.constants)}"
        self.constants.append(np.asarray(values[rank], tf.as_dtype(dtype).as_numpy_dtype))
        return self.writer.argument(argument, dtype)

    def _groups(self, op: Op) -> list[list[int]]:
        if ONCE in op.attrs and self.rank != 0 and all(t.is_static for t in op.outputs):
            return []  # a Broadcast brings the outputs
        return [[self.rank]]

    def _collective(self, op: Op) -> None:
        group = next(g for g in self.mesh.groups(op.attrs["axes"]) if self.rank in g)
        edges, wire, dtype = self.edges[self.rank], self._wire, op.inputs[0].dtype
        operands = [Operand(edges[t], t.shape) for t in op.inputs if t in edges]
        if op.type == "AllReduce":
            sources = [edge for edge, _ in operands]
            results = wire.all_reduce(op.name, sources, dtype, op.attrs["reduction"], group)
        elif op.type == "AllGather":
            results = wire.all_gathers(op.name, operands, dtype, op.attrs["dims"], group)
        elif op.type == "ReduceScatter":
            reduction, dims = op.attrs["reduction"], op.attrs["dims"]
            results = wire.reduce_scatters(op.name, operands, dtype, reduction, dims, group)
        elif op.type == "AllToAll":
            split_dims, concat_dims = op.attrs["split_dims"], op.attrs["concat_dims"]
            results = wire.all_to_alls(op.name, operands, dtype, split_dims, concat_dims, group)
        else:
            results = [
                wire.broadcast(f"{op.name}/{i}", self._known(f"{op.name}/{i}", t), t.dtype, group)
                for i, t in enumerate(op.inputs)
            ]
        edges.update(zip(op.outputs, results, strict=True))

    def _known(self, name: str, tensor: Tensor) -> str:
        """The tensor, or zeros of its shape where another rank computes it."""
        edge = self.edges[self.rank].get(tensor)
        if edge is not None:
            return edge
        device = self.devices[self.rank]
        dims = self._const(f"{name}/dims", np.array(tensor.shape, np.int32), device)
        zeros = [np.zeros(())] * self.mesh.size
        inputs = [dims, self._rank_constant(f"{name}/zero", zeros, tensor.dtype, self.rank)]
        attrs = serialize_attrs({"T": DType(tensor.dtype), "index_type": DType("int32")})
        self.writer.node(f"{name}/zeros", "Fill", inputs, attrs, device)
        return f"{name}/zeros:output:0"
