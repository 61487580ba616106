"""Linking local programs: their ops for each rank of this process, as one TensorFlow function.

What a collective or a transfer is, and which ranks a process has, is the backend's.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import numpy as np

from tfpar.compile.local.local_graph import TASK, LocalProgram
from tfpar.compile.local.programs import Group, ProgramSet
from tfpar.compile.local.rank_dependence import DIFFERS
from tfpar.compile.local.reshard import COLLECTIVE_TYPES, ONCE
from tfpar.ir.graph import DType, Op, Tensor
from tfpar.ir.traits import ON_HOST, VARIABLE_READS
from tfpar.spec import Shard, Spec, local_indices
from tfpar.tf.runtime.backends.tasks import TaskFunction, link_task
from tfpar.tf.runtime.bodies import BodyWriter, has_bodies
from tfpar.tf.runtime.devices import holders, host_of, memory_of
from tfpar.tf.runtime.function_def import (
    FunctionWriter,
    RegisteredFunction,
    const_attrs,
    output_edges,
    serialize_attrs,
)


def link_function(
    programs: ProgramSet, linkers: Mapping[Group, Linker], name: str
) -> RegisteredFunction:
    """The function `name` of what the linkers write, each of its group's program."""
    writer = FunctionWriter(name, bounded=True)
    for linker in linkers.values():
        linker.begin(writer)
    for group, op in programs.in_order():
        if group in linkers:
            linkers[group].write(op)
    for linker in linkers.values():
        linker.end()
    bodies = [body for linker in linkers.values() for body in linker.registered]
    return writer.register(bodies=bodies)


class Linker(abc.ABC):
    """Writer of a local program into a function.

    A rank here is one of the program's mesh; only nodes and transfers are named by the job's.

    Args:
        program: what every rank of the group runs.
        group: the rank in the job of each rank.
        devices: the device of each rank, as this process names it.
        ranks: the ranks that live in this process.
        variable_holders: per variable, for each rank the rank whose shard it uses.
        scope: begins the names that another program in the function could have, too.
    """

    writer: FunctionWriter

    def __init__(
        self,
        program: LocalProgram,
        group: Group,
        devices: Sequence[str],
        ranks: Sequence[int],
        variable_holders: Sequence[Sequence[int]],
        scope: str = "",
    ) -> None:
        self.program = program
        self.mesh = program.mesh
        self.group = group
        self.devices = list(devices)
        self.ranks = list(ranks)
        self.memories = [memory_of(device) for device in devices]
        self.holders = dict(
            zip((v.handle for v in program.graph.variables), variable_holders, strict=True)
        )
        self.scope = scope
        self.edges: dict[int, dict[Tensor, str]] = {rank: {} for rank in self.ranks}
        self.nodes: dict[int, dict[Op, str]] = {rank: {} for rank in self.ranks}
        self.bodies = BodyWriter(program.graph.functions)
        self._tasks: dict[str, list[TaskFunction]] = {}

    def open(self, writer: FunctionWriter) -> None:
        """Write to this function from now on."""
        self.writer = writer

    def begin(self, writer: FunctionWriter) -> None:
        """Write to this function, and add the arguments of the program."""
        self.open(writer)
        self._arguments()

    def write(self, op: Op) -> None:
        """Add an op of the program."""
        if op.type == "Placeholder":
            return
        if op.type in COLLECTIVE_TYPES:
            self._collective(op)
            self._note_nodes(op)
        elif op.type == TASK:
            self._task(op)
        elif op.type == "Send":
            self._send(op)
        elif op.type == "Recv":
            self._recv(op)
            self._note_nodes(op)
        else:
            self._local(op)

    def end(self) -> None:
        """Add what the program returns, and what must run all the same."""
        graph = self.program.graph
        for tensor in graph.outputs:
            self.writer.output(self.edges[self.ranks[0]][tensor], tensor.dtype)
        self.write_effects()

    def write_effects(self) -> None:
        """Make run what nothing reads and has to run all the same."""
        effects = self.program.graph.effects
        nodes = (self.nodes[r][op] for op in effects for r in self.ranks if op in self.nodes[r])
        for node in dict.fromkeys(nodes):
            self.writer.effect(node)

    @property
    def registered(self) -> list[RegisteredFunction]:
        """The functions that what this linker has written calls."""
        tasks = [task.function for made in self._tasks.values() for task in made]
        return [*self.bodies.registered, *tasks]

    @abc.abstractmethod
    def inner(self, program: LocalProgram) -> Linker:
        """A linker like this one for a part of its program, which has no variables of its own."""

    def _task(self, op: Op) -> None:
        """Call the function of a task, for all ranks of this process at once."""
        made = self._tasks.setdefault(op.attrs["body"], [])
        given = [[self.edges[rank][t] for rank in self.ranks] for t in op.inputs]
        task = next((t for t in made if t.takes(given)), None)
        if task is None:
            task = link_task(self, op, given)
            made.append(task)
        name = f"{self.scope}{op.name}"
        nodes = (self.nodes[r][c] for r in self.ranks for c in op.control if c in self.nodes[r])
        control = self._announced(op, [row[0] for row in given], list(dict.fromkeys(nodes)))
        task.call(self.writer, name, op, given, self.devices[self.ranks[0]], control)
        for position, rank in enumerate(self.ranks):
            self.nodes[rank][op] = name
            for tensor, at in zip(op.outputs, task.results, strict=True):
                self.edges[rank][tensor] = f"{name}:output:{at[position]}"

    def _announced(self, op: Op, given: Sequence[str], control: Sequence[str]) -> Sequence[str]:
        """Return the control inputs of a task's call; a backend may add nodes that announce it.

        Args:
            given: the edges that the first rank reads.
            control: nodes.
        """
        return control

    @abc.abstractmethod
    def _collective(self, op: Op) -> None:
        """Emit a collective, and set the edges of its outputs for every rank."""

    @abc.abstractmethod
    def _send(self, op: Op) -> None:
        """Send the operand on every rank that has a channel, and note the nodes, if any."""

    @abc.abstractmethod
    def _recv(self, op: Op) -> None:
        """Set the edges of what every rank receives."""

    def _empty(self, recv: Op, rank: int) -> str:
        """The edge of what a rank receives that has no entries."""
        (tensor,) = recv.outputs
        attrs = const_attrs(np.zeros(self.program.shape_on(rank, tensor)), tensor.dtype)
        name = f"{self.scope}r{self.group[rank]}/{recv.name}/empty"
        self.writer.node(name, "Const", (), attrs, self.devices[rank])
        return f"{name}:output:0"

    def _note_nodes(self, collective: Op) -> None:
        """Let ops wait for `collective`: for what makes its last result on each rank."""
        for rank in self.ranks:
            node, _, output = self.edges[rank][collective.outputs[-1]].partition(":")
            if output:  # else it is an argument, which is there from the start
                self.nodes[rank][collective] = node

    @abc.abstractmethod
    def _rank_constant(self, name: str, values: Sequence[np.ndarray], dtype: str, rank: int) -> str:
        """The edge of a constant in which ranks differ, for `rank`."""

    # --- arguments ---------------------------------------------------------------

    def _arguments(self) -> None:
        """Inputs, then variables; a backend may add more."""
        graph = self.program.graph
        wholes = [
            self.writer.argument(f"{self.scope}in{i}", tensor.dtype)
            for i, tensor in enumerate(graph.inputs)
        ]
        for i, variable in enumerate(graph.variables):
            holding = self.holders[variable.handle]
            names = {
                rank: self.writer.argument(
                    f"{self.scope}var{i}_r{self.group[rank]}",
                    "resource",
                    variable.shape,
                    variable.dtype,
                )
                for rank in sorted({holding[r] for r in self.ranks})
            }
            for rank in self.ranks:
                self.edges[rank][variable.handle] = names[holding[rank]]
        for i, whole in enumerate(wholes):
            self._feed_ranks(i, whole)

    def _feed_ranks(self, index: int, whole: str) -> None:
        program = self.program
        tensor, shape = program.graph.inputs[index], program.input_shapes[index]
        spec = program.input_specs[index]
        first = holders(spec, self.mesh, self.devices)
        for rank in self.ranks:
            self.edges[rank][tensor] = (
                self._feed(f"in{index}", whole, tensor, shape, spec, rank)
                if rank == first[rank]
                else self.edges[first[rank]][tensor]
            )

    def _feed(
        self, name: str, whole: str, tensor: Tensor, shape: Sequence[int], spec: Spec, rank: int
    ) -> str:
        """Return the edge of this rank's part of a whole input; padding repeats the last entry.

        Padded samples are real samples, so that nothing computed on them (a division, a
        lookup) can fail; every reduction masks them.
        """
        edge = whole
        dims = sorted({p.dim for p in spec if isinstance(p, Shard)})
        for dim in dims:
            length = shape[dim]
            every = [
                local_indices(length, dim, spec, self.mesh, self.mesh.coordinates(r))
                for r in range(self.mesh.size)
            ]
            filled = [np.where(at < 0, length - 1, at).astype(np.int32) for at in every]
            edge = self._gather(
                f"r{self.group[rank]}/feed/{name}_{dim}", edge, filled, dim, tensor, rank
            )
        return edge

    def _gather(
        self,
        name: str,
        edge: str,
        indices: Sequence[np.ndarray],
        dim: int,
        tensor: Tensor,
        rank: int,
    ) -> str:
        attrs = serialize_attrs(
            {
                "Tparams": DType(tensor.dtype),
                "Tindices": DType("int32"),
                "Taxis": DType("int32"),
                "batch_dims": 0,
            }
        )
        device = self.devices[rank]
        inputs = [
            edge,
            self._rank_constant(f"{name}/index", indices, "int32", rank),
            self._const(f"{name}/axis", np.int32(dim), device),
        ]
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
        for ranks in self._groups(op):
            first = ranks[0]
            name, device = f"r{self.group[first]}/{op.name}", self._device(op, first)
            if op.type == "RankConst":
                edge = self._rank_constant(name, op.attrs["values"], op.outputs[0].dtype, first)
                for rank in ranks:
                    self.edges[rank][op.outputs[0]] = edge
                continue
            if has_bodies(op):
                attrs = self.bodies.attrs(op, first, device)
            inputs = [self.edges[first][t] for t in op.inputs]
            control = {
                self.nodes[r][c]: None for r in ranks for c in op.control if c in self.nodes[r]
            }
            self.writer.node(name, op.type, inputs, attrs, device, list(control))
            for rank in ranks:
                self.nodes[rank][op] = name
                for tensor, suffix in zip(op.outputs, output_edges(op), strict=True):
                    self.edges[rank][tensor] = f"{name}:{suffix}"

    def _groups(self, op: Op) -> list[list[int]]:
        """The ranks that run `op`, in groups for which it runs once."""
        return [[0]] if ONCE in op.attrs else self._alike(op)

    def _alike(self, op: Op) -> list[list[int]]:
        """The ranks in groups for which `op` runs once.

        In one memory: those that run it on the same tensors, and those that write the same
        variable, who write the same value even where each has computed it. Of a region that they
        may share it is known.
        """
        groups: dict[tuple, list[int]] = {}
        if DIFFERS in op.attrs:
            for rank in self.ranks:
                at = self.mesh.coordinates(rank)
                groups.setdefault(tuple(at[a] for a in op.attrs[DIFFERS]), []).append(rank)
            return list(groups.values())
        differ = has_bodies(op) and self.bodies.differ(op)
        written = [t for t in op.inputs if t in self.holders and op.type not in VARIABLE_READS]
        for rank in self.ranks:
            read = written if written and not differ else op.inputs
            memory = self.memories[rank]
            if ON_HOST in op.attrs:
                memory = memory_of(host_of(self.devices[rank]))
            key: tuple = (memory, *(self.edges[rank][t] for t in read))
            if op.type == "RankConst":
                value = np.asarray(op.attrs["values"][rank])
                key = (*key, value.shape, value.tobytes())
            groups.setdefault((*key, rank) if differ else key, []).append(rank)
        return list(groups.values())

    def _device(self, op: Op, rank: int) -> str:
        """The device that runs `op` for `rank`: its host, or where its variables lie."""
        if ON_HOST in op.attrs:
            return host_of(self.devices[rank])
        for tensor in op.inputs:
            if tensor in self.holders:
                return self.devices[self.holders[tensor][rank]]
        return self.devices[rank]
