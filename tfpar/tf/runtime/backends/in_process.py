"""The in-process backend: all ranks in one TensorFlow function.

Each rank's ops are placed on its own device. A collective is plain arithmetic on the
tensors of a group (an all-reduce is a sum), and a transfer is an edge, so neither can deadlock.
Inputs are given whole, once, and cut inside the function. Ranks in one memory (the virtual CPUs of
a host) do not repeat each other: an op that several would run on the very same tensors runs on the
first of them, and a shard that several hold is stored once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfpar.compile.local.local_graph import LocalProgram
from tfpar.compile.local.programs import Group, ProgramSet
from tfpar.compile.local.rank_dependence import find_body_inputs
from tfpar.compile.local.reshard import COLLECTIVE_TYPES
from tfpar.compile.local.transfers import Channel, channels_of
from tfpar.ir.graph import DType, Op, Tensor
from tfpar.tf.runtime.backends.linker import Linker, link_function
from tfpar.tf.runtime.devices import holders, host_of
from tfpar.tf.runtime.function_def import RegisteredFunction, const_attrs, serialize_attrs

_COMBINE = {
    "sum": "AddV2",
    "prod": "Mul",
    "max": "Maximum",
    "min": "Minimum",
    "any": "LogicalOr",
    "all": "LogicalAnd",
}


class InProcessProgram:
    """Local programs linked for all ranks of a job.

    Call it with the whole inputs and the handles of every rank's variables.

    Attributes:
        holders: per variable, for each rank of its program the rank whose shard it uses.
        function: the ops of all ranks.

    Raises:
        TfparError: a transfer has one end only, or two programs wait for each other.
    """

    def __init__(self, programs: ProgramSet, devices: Sequence[str], name: str = "tfpar") -> None:
        programs.channels()
        sent: dict[Channel, str] = {}
        linkers: dict[Group, _Linker] = {}
        self.holders: list[tuple[int, ...]] = []
        self._arguments: list[tuple[int, list[tuple[int, ...]]]] = []
        for i, (group, program) in enumerate(programs.programs.items()):
            own = [devices[rank] for rank in group]
            held = _variable_holders(program, own)
            scope = f"p{i}_" if len(programs.programs) > 1 else ""
            linkers[group] = _Linker(program, group, own, held, scope, sent)
            self.holders += held
            self._arguments.append((len(program.graph.inputs), held))
        self.function: RegisteredFunction = link_function(programs, linkers, name)

    def __call__(
        self, inputs: Sequence[tf.Tensor], handles: Sequence[Mapping[int, tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Run one step.

        Of several programs, the inputs, variables and results follow each other.

        Args:
            inputs: one whole tensor per graph input.
            handles: per variable, the resource handle of each rank's shard.
        """
        fed, shards = iter(inputs), iter(handles)
        flat: list[tf.Tensor] = []
        for num_inputs, held in self._arguments:
            flat += itertools.islice(fed, num_inputs)
            for holding in held:
                of_ranks = next(shards)
                flat += [of_ranks[rank] for rank in sorted(set(holding))]
        return self.function(flat)


def _variable_holders(program: LocalProgram, devices: Sequence[str]) -> list[tuple[int, ...]]:
    """`holders` of every variable.

    What a loop, branch or call uses stays with each rank: its body runs on one device, and
    resources are used only where they lie.
    """
    ranks = tuple(range(program.mesh.size))
    own = find_body_inputs(program.graph)
    hosts = [*map(host_of, devices)]
    return [
        ranks
        if variable.handle in own
        else holders(
            program.variable_specs[variable.name],
            program.mesh,
            hosts if variable.on_host else devices,
        )
        for variable in program.graph.variables
    ]


class _Linker(Linker):
    """Linker of all ranks in one process: collectives are plain arithmetic on their tensors.

    Args:
        sent: the edge of what each channel carries, which all linkers of a function share.
    """

    def __init__(
        self,
        program: LocalProgram,
        group: Group,
        devices: Sequence[str],
        variable_holders: Sequence[Sequence[int]],
        scope: str,
        sent: dict[Channel, str],
    ) -> None:
        super().__init__(program, group, devices, range(len(group)), variable_holders, scope)
        self._sent = sent
        self._bucket = 0

    def inner(self, program: LocalProgram) -> _Linker:
        return _Linker(program, self.group, self.devices, (), self.scope, self._sent)

    def _rank_constant(self, name: str, values: Sequence[np.ndarray], dtype: str, rank: int) -> str:
        attrs = const_attrs(values[rank], dtype)
        self.writer.node(name, "Const", (), attrs, self.devices[rank])
        return f"{name}:output:0"

    # --- collectives -------------------------------------------------------------

    def _collective(self, op: Op) -> None:
        emit = getattr(self, f"_{COLLECTIVE_TYPES[op.type]}")
        emitted: dict[tuple, Sequence[int]] = {}
        for index, group in enumerate(self.mesh.groups(op.attrs["axes"])):
            key = tuple(
                part
                for rank in group
                for part in (self.memories[rank], *map(self.edges[rank].get, op.inputs))
            )
            first = emitted.setdefault(key, group)
            if first is group:
                emit(op, f"{self.scope}{op.name}/g{index}", group)
                continue
            for rank, other in zip(group, first, strict=True):
                for tensor in op.outputs:
                    self.edges[rank][tensor] = self.edges[other][tensor]
        self._bucket += 1

    # --- transfers -----------------------------------------------------------------

    def _send(self, op: Op) -> None:
        for rank, channel in zip(self.ranks, channels_of(op, self.group), strict=True):
            if channel is not None:
                self._sent[channel] = self.edges[rank][op.inputs[0]]

    def _recv(self, op: Op) -> None:
        for rank, channel in zip(self.ranks, channels_of(op, self.group), strict=True):
            (tensor,) = op.outputs
            edge = self._empty(op, rank) if channel is None else self._sent[channel]
            self.edges[rank][tensor] = edge

    # --- collectives, of one group -------------------------------------------------

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
        device = self.devices[group[0]]
        operands = zip(op.inputs, op.outputs, op.attrs["dims"], strict=True)
        for i, (source, result, dim) in enumerate(operands):
            parts = [self.edges[r][source] for r in group]
            edge = self._concat(f"{name}/{i}", parts, dim, source.dtype, device)
            for rank in group:
                self.edges[rank][result] = edge

    def _concat(self, name: str, parts: Sequence[str], dim: int, dtype: str, device: str) -> str:
        attrs = serialize_attrs({"T": DType(dtype), "N": len(parts), "Tidx": DType("int32")})
        axis = self._const(f"{name}/axis", np.int32(dim), device)
        self.writer.node(name, "ConcatV2", [*parts, axis], attrs, device)
        return f"{name}:output:0"

    def _reduce_scatter(self, op: Op, name: str, group: Sequence[int]) -> None:
        operands = zip(op.inputs, op.outputs, op.attrs["dims"], strict=True)
        for i, (source, result, dim) in enumerate(operands):
            for position, rank in enumerate(group):
                parts = self._blocks(f"{name}/{i}", source, dim, group, position)
                self.edges[rank][result] = self._combine(
                    f"{name}/{i}/{position}",
                    parts,
                    op.attrs["reduction"],
                    source.dtype,
                    self.devices[rank],
                )

    def _all_to_all(self, op: Op, name: str, group: Sequence[int]) -> None:
        dims = zip(op.attrs["split_dims"], op.attrs["concat_dims"], strict=True)
        operands = zip(op.inputs, op.outputs, dims, strict=True)
        for i, (source, result, (split_dim, concat_dim)) in enumerate(operands):
            for position, rank in enumerate(group):
                parts = self._blocks(f"{name}/{i}", source, split_dim, group, position)
                self.edges[rank][result] = self._concat(
                    f"{name}/{i}/{position}", parts, concat_dim, source.dtype, self.devices[rank]
                )

    def _blocks(
        self, name: str, source: Tensor, dim: int, group: Sequence[int], position: int
    ) -> list[str]:
        """The block along `dim` that the rank at `position` gets of every rank of the group."""
        device = self.devices[group[position]]
        return [
            self._block(
                f"{name}/{position}_{i}",
                source,
                r,
                dim,
                position,
                len(group),
                device,
            )
            for i, r in enumerate(group)
        ]

    def _broadcast(self, op: Op, name: str, group: Sequence[int]) -> None:
        for source, result in zip(op.inputs, op.outputs, strict=True):
            for rank in group:
                self.edges[rank][result] = self.edges[group[0]][source]

    def _permute(self, op: Op, name: str, group: Sequence[int]) -> None:
        for source, result in zip(op.inputs, op.outputs, strict=True):
            edges = [self.edges[rank][source] for rank in group]
            for edge, target in zip(edges, op.attrs["targets"], strict=True):
                self.edges[group[target]][result] = edge

    def _block(
        self, name: str, tensor: Tensor, rank: int, dim: int, position: int, parts: int, device: str
    ) -> str:
        """Slice block `position` of `parts` along `dim` from the tensor of `rank`."""
        shape = self.program.shape_on(rank, tensor)
        size = [-1 if n is None else n for n in shape]
        size[dim] //= parts
        begin = [0] * len(size)
        begin[dim] = position * size[dim]
        attrs = serialize_attrs({"T": DType(tensor.dtype), "Index": DType("int32")})
        inputs = [
            self.edges[rank][tensor],
            self._const(f"{name}/begin", np.array(begin, np.int32), device),
            self._const(f"{name}/size", np.array(size, np.int32), device),
        ]
        self.writer.node(name, "Slice", inputs, attrs, device)
        return f"{name}:output:0"
