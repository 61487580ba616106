"""The in-process backend: all ranks in one TensorFlow function.

Each rank's ops are placed on its own device. A collective is plain arithmetic on the
tensors of a group (an all-reduce is a sum), so it cannot deadlock. Inputs are
given whole, once, and cut inside the function. Ranks in one memory (the virtual CPUs of a host)
do not repeat each other: an op that several would run on the very same tensors runs on the first
of them, and a shard that several hold is stored once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfpar.ir.graph import VARIABLE_READS, DType, Op, Tensor
from tfpar.rewrite.local_graph import LocalProgram
from tfpar.rewrite.reshard import COLLECTIVE_TYPES, ONCE
from tfpar.runtime.bodies import BodyWriter, has_bodies
from tfpar.runtime.devices import holders, memory_of
from tfpar.runtime.function_def import (
    FunctionWriter,
    RegisteredFunction,
    const_attrs,
    output_edges,
    serialize_attrs,
)
from tfpar.spec import Shard, Spec, local_indices

_COMBINE = {
    "sum": "AddV2", "prod": "Mul", "max": "Maximum", "min": "Minimum",
    "any": "LogicalOr", "all": "LogicalAnd",
}  # fmt: skip


class InProcessProgram:
    """A local program linked for all ranks of its mesh.

    Call it with the whole inputs and the handles of every rank's variables.

    Attributes:
        holders: per variable, for each rank the rank whose shard it uses.
        function: the ops of all ranks.
    """

    def __init__(self, program: LocalProgram, devices: Sequence[str], name: str = "tfpar") -> None:
        self.program = program
        self.holders = _variable_holders(program, devices)
        linker = _Linker(program, devices, self.holders, name)
        self.function: RegisteredFunction = linker.link()

    def __call__(
        self, inputs: Sequence[tf.Tensor], handles: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Run one step.

        Args:
            inputs: one whole tensor per graph input.
            handles: per variable, the resource handle of each rank's shard.
        """
        flat = list(inputs)
        for shards, holding in zip(handles, self.holders, strict=True):
            flat += [shards[rank] for rank in sorted(set(holding))]
        return self.function(flat)


def _variable_holders(program: LocalProgram, devices: Sequence[str]) -> list[tuple[int, ...]]:
    """`holders` of every variable.

    What a loop, branch or call uses stays with each rank: its body runs on one device, and
    resources are used only where they lie.
    """
    ranks = tuple(range(program.mesh.size))
    own = {t for op in program.graph.ops if has_bodies(op) for t in op.inputs}
    return [
        ranks
        if variable.handle in own
        else holders(program.variable_specs[variable.name], program.mesh, devices)
        for variable in program.graph.variables
    ]


class _Linker:
    def __init__(
        self, program: LocalProgram, devices: Sequence[str],
        holders: Sequence[Sequence[int]], name: str,
    ) -> None:  # fmt: skip
        self.program = program
        self.mesh = program.mesh
        self.devices = list(devices)
        self.memories = [memory_of(device) for device in devices]
        self.holders = dict(zip((v.handle for v in program.graph.variables), holders, strict=True))
        self.writer = FunctionWriter(name)
        self.ranks = range(self.mesh.size)
        self.edges: list[dict[Tensor, str]] = [{} for _ in self.ranks]
        self.nodes: list[dict[Op, str]] = [{} for _ in self.ranks]
        self.bodies = BodyWriter(program.graph.functions)
        self._bucket = 0

    def link(self) -> RegisteredFunction:
        graph = self.program.graph
        self._arguments()
        for op in graph.ops:
            if op.type == "Placeholder":
                continue
            if op.type in COLLECTIVE_TYPES:
                self._collective(op)
            else:
                self._local(op)
        for tensor in graph.outputs:
            self.writer.output(self.edges[0][tensor], tensor.dtype)
        nodes = (
            self.nodes[r][op] for op in graph.effects for r in self.ranks if op in self.nodes[r]
        )
        for node in dict.fromkeys(nodes):
            self.writer.effect(node)
        return self.writer.register(bodies=self.bodies.registered)

    # --- arguments ---------------------------------------------------------------

    def _arguments(self) -> None:
        graph, shapes = self.program.graph, self.program.input_shapes
        for i, (tensor, spec) in enumerate(
            zip(graph.inputs, self.program.input_specs, strict=True)
        ):
            whole = self.writer.argument(f"in{i}", tensor.dtype)
            for rank, first in enumerate(holders(spec, self.mesh, self.devices)):
                self.edges[rank][tensor] = (
                    self._feed(f"in{i}", whole, tensor, shapes[i], spec, rank)
                    if rank == first
                    else self.edges[first][tensor]
                )
        for i, variable in enumerate(graph.variables):
            holding = self.holders[variable.handle]
            names = {
                rank: self.writer.argument(
                    f"var{i}_r{rank}", "resource", variable.shape, variable.dtype
                )
                for rank in sorted(set(holding))
            }
            for rank in self.ranks:
                self.edges[rank][variable.handle] = names[holding[rank]]

    def _feed(
        self, name: str, whole: str, tensor: Tensor, shape: Sequence[int], spec: Spec, rank: int
    ) -> str:
        """This rank's part of a whole input; padding repeats the last entry.

        Padded samples are real samples, so that nothing computed on them (a division, a
        lookup) can fail; every reduction masks them.
        """
        edge = whole
        dims = sorted({p.dim for p in spec if isinstance(p, Shard)})
        for dim in dims:
            length = shape[dim]
            at = local_indices(length, dim, spec, self.mesh, self.mesh.coordinates(rank))
            filled = np.where(at < 0, length - 1, at).astype(np.int32)
            edge = self._gather(f"r{rank}/feed/{name}_{dim}", edge, filled, dim, tensor, rank)
        return edge

    def _gather(
        self, name: str, edge: str, index: np.ndarray, dim: int, tensor: Tensor, rank: int
    ) -> str:
        attrs = serialize_attrs(
            {"Tparams": DType(tensor.dtype), "Tindices": DType("int32"), "Taxis": DType("int32"),
             "batch_dims": 0}
        )  # fmt: skip
        device = self.devices[rank]
        inputs = [edge, self._const(f"{name}/index", index, device),
                  self._const(f"{name}/axis", np.int32(dim), device)]  # fmt: skip
        self.writer.node(name, "GatherV2", inputs, attrs, device)
        return f"{name}:output:0"

    def _const(self, name: str, value: np.ndarray, device: str) -> str:
        self.writer.node(name, "Const", (), const_attrs(value, value.dtype.name), device)
        return f"{name}:output:0"

    # --- local ops ---------------------------------------------------------------

    def _local(self, op: Op) -> None:
        attrs = b""
        if op.type == "Const":
            attrs = const_attrs(op.attrs["value"], op.outputs[0].dtype)
        elif op.type != "RankConst":
            attrs = serialize_attrs(op.attrs)
        for ranks in [[0]] if ONCE in op.attrs else self._alike(op):
            first = ranks[0]
            name, op_type, device = f"r{first}/{op.name}", op.type, self._device(op, first)
            if op.type == "RankConst":
                op_type = "Const"
                attrs = const_attrs(op.attrs["values"][first], op.outputs[0].dtype)
            elif has_bodies(op):
                attrs = self.bodies.attrs(op, first, device)
            inputs = [self.edges[first][t] for t in op.inputs]
            control = {
                self.nodes[r][c]: None for r in ranks for c in op.control if c in self.nodes[r]
            }
            self.writer.node(name, op_type, inputs, attrs, device, list(control))
            suffixes = ["output:0"] if op.type == "RankConst" else output_edges(op)
            for rank in ranks:
                self.nodes[rank][op] = name
                for tensor, suffix in zip(op.outputs, suffixes, strict=True):
                    self.edges[rank][tensor] = f"{name}:{suffix}"

    def _alike(self, op: Op) -> list[list[int]]:
        """The ranks in groups for which `op` runs once.

        In one memory: those that run it on the same tensors, and those that write the same
        variable, who write the same value even where each has computed it.
        """
        groups: dict[tuple, list[int]] = {}
        differ = has_bodies(op) and self.bodies.differ(op)
        written = [t for t in op.inputs if t in self.holders and op.type not in VARIABLE_READS]
        for rank in self.ranks:
            read = written if written and not differ else op.inputs
            key: tuple = (self.memories[rank], *(self.edges[rank][t] for t in read))
            if op.type == "RankConst":
                key = (*key, np.asarray(op.attrs["values"][rank]).tobytes())
            groups.setdefault((*key, rank) if differ else key, []).append(rank)
        return list(groups.values())

    def _device(self, op: Op, rank: int) -> str:
        """The device that runs `op` for `rank`: where its variables lie."""
        for tensor in op.inputs:
            if tensor in self.holders:
                return self.devices[self.holders[tensor][rank]]
        return self.devices[rank]

    # --- collectives -------------------------------------------------------------

    def _collective(self, op: Op) -> None:
        emit = getattr(self, f"_{_SNAKE[op.type]}")
        emitted: dict[tuple, Sequence[int]] = {}
        for index, group in enumerate(self.mesh.groups(op.attrs["axes"])):
            key = tuple(
                part
                for rank in group
                for part in (self.memories[rank], *map(self.edges[rank].get, op.inputs))
            )
            first = emitted.setdefault(key, group)
            if first is group:
                emit(op, f"{op.name}/g{index}", group)
                continue
            for rank, other in zip(group, first, strict=True):
                for tensor in op.outputs:
                    self.edges[rank][tensor] = self.edges[other][tensor]
        self._bucket += 1

    def _all_reduce(self, op: Op, name: str, group: Sequence[int]) -> None:
        device = self.devices[group[self._bucket % len(group)]]
        for i, (source, result) in enumerate(zip(op.inputs, op.outputs, strict=True)):
            parts = [self.edges[r][source] for r in group]
            edge = self._combine(f"{name}/{i}", parts, op.attrs["reduction"], source.dtype, device)
            for rank in group:
                self.edges[rank][result] = edge

    def _combine(
        self, name: str, parts: Sequence[str], reduction: str, dtype: str, device: str
    ) -> str:
        """Reduce `parts` on `device`."""
        if len(parts) == 1:
            return parts[0]
        if reduction == "sum" and len(parts) > 2:
            attrs = serialize_attrs({"T": DType(dtype), "N": len(parts)})
            self.writer.node(name, "AddN", parts, attrs, device)
            return f"{name}:sum:0"
        op_type = _COMBINE[reduction]
        attrs = b"" if dtype == "bool" else serialize_attrs({"T": DType(dtype)})
        edge = parts[0]
        for i, part in enumerate(parts[1:]):
            self.writer.node(f"{name}/{i}", op_type, [edge, part], attrs, device)
            edge = f"{name}/{i}:z:0"
        return edge

    def _all_gather(self, op: Op, name: str, group: Sequence[int]) -> None:
        (source,), (result,) = op.inputs, op.outputs
        parts = [self.edges[r][source] for r in group]
        device = self.devices[group[0]]
        edge = self._concat(name, parts, op.attrs["dim"], source.dtype, device)
        for rank in group:
            self.edges[rank][result] = edge

    def _concat(self, name: str, parts: Sequence[str], dim: int, dtype: str, device: str) -> str:
        attrs = serialize_attrs({"T": DType(dtype), "N": len(parts), "Tidx": DType("int32")})
        axis = self._const(f"{name}/axis", np.int32(dim), device)
        self.writer.node(name, "ConcatV2", [*parts, axis], attrs, device)
        return f"{name}:output:0"

    def _reduce_scatter(self, op: Op, name: str, group: Sequence[int]) -> None:
        (source,), (result,) = op.inputs, op.outputs
        for position, rank in enumerate(group):
            parts = self._blocks(name, source, op.attrs["dim"], group, position)
            self.edges[rank][result] = self._combine(
                f"{name}/{position}", parts, op.attrs["reduction"], source.dtype, self.devices[rank]
            )

    def _all_to_all(self, op: Op, name: str, group: Sequence[int]) -> None:
        (source,), (result,) = op.inputs, op.outputs
        for position, rank in enumerate(group):
            parts = self._blocks(name, source, op.attrs["split_dim"], group, position)
            self.edges[rank][result] = self._concat(
                f"{name}/{position}", parts, op.attrs["concat_dim"], source.dtype,
                self.devices[rank],
            )  # fmt: skip

    def _blocks(
        self, name: str, source: Tensor, dim: int, group: Sequence[int], position: int
    ) -> list[str]:
        """The block along `dim` that the rank at `position` gets of every rank of the group."""
        device = self.devices[group[position]]
        return [
            self._block(
                f"{name}/{position}_{i}", self.edges[r][source], source, dim, position,
                len(group), device,
            )
            for i, r in enumerate(group)
        ]  # fmt: skip

    def _broadcast(self, op: Op, name: str, group: Sequence[int]) -> None:
        for source, result in zip(op.inputs, op.outputs, strict=True):
            for rank in group:
                self.edges[rank][result] = self.edges[group[0]][source]

    def _block(
        self, name: str, edge: str, tensor: Tensor, dim: int, position: int, parts: int, device: str
    ) -> str:
        """Block `position` of `parts` along `dim`."""
        size = [-1 if n is None else n for n in tensor.shape]
        size[dim] //= parts
        begin = [0] * len(size)
        begin[dim] = position * size[dim]
        attrs = serialize_attrs({"T": DType(tensor.dtype), "Index": DType("int32")})
        inputs = [
            edge,
            self._const(f"{name}/begin", np.array(begin, np.int32), device),
            self._const(f"{name}/size", np.array(size, np.int32), device),
        ]
        self.writer.node(name, "Slice", inputs, attrs, device)
        return f"{name}:output:0"


_SNAKE = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
    "AllToAll": "all_to_all", "Broadcast": "broadcast",
}  # fmt: skip
