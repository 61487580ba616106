"""Backend for one rank per process: the local program of its group, collectives on a transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfpar.compile.local.local_graph import TASK, LocalProgram
from tfpar.compile.local.programs import Group, ProgramSet
from tfpar.compile.local.reshard import ONCE
from tfpar.compile.local.transfers import channels_of, permuted_channels
from tfpar.ir.graph import DType, Op, Tensor
from tfpar.jobs.launch.beacon import TaskProgress
from tfpar.spec import Spec
from tfpar.tf.runtime.backends.linker import Linker, link_function
from tfpar.tf.runtime.backends.transport import Connections, Transport
from tfpar.tf.runtime.backends.wire import Wire, WireOperand
from tfpar.tf.runtime.function_def import (
    FunctionWriter,
    RegisteredFunction,
    const_attrs,
    serialize_attrs,
)
from tfpar.tf.variables.values import plain_variable


class ProcessProgram:
    """The local program of its group, linked for the one rank that this process is.

    Call it as an `InProcessProgram`; inputs are this rank's parts where it is fed in parts.

    Args:
        connections: all that programs of the job need, as all ranks know it.

    Attributes:
        holders: per variable, for each rank of the group the rank whose shard it uses: its own.
        function: the same on every rank of the group: constants in which ranks differ are
            arguments. Were they inside, TensorFlow could fold a collective away on one rank alone.
    """

    def __init__(
        self,
        programs: ProgramSet,
        devices: Sequence[str],
        transport: Transport,
        connections: Connections,
        fed_in_parts: bool = False,
        name: str = "tfpar",
    ) -> None:
        group = programs.group_of(transport.rank)
        program = programs.programs[group]
        self.rank = group.index(transport.rank)
        self.holders = [tuple(range(len(group))) for _ in program.graph.variables]
        transport.connect(*connections)
        own = [devices[rank] for rank in group]
        self._progress = Progress.of(program)
        linker = _Linker(program, group, own, transport, self.holders, fed_in_parts, self._progress)
        alone = ProgramSet({group: program})
        self.function: RegisteredFunction = link_function(alone, {group: linker}, name)
        with tf.device("CPU:0"):
            self._constants = [tf.constant(value) for value in linker.constants]

    def __call__(
        self, inputs: Sequence[tf.Tensor], handles: Sequence[Mapping[int, tf.Tensor]]
    ) -> list[tf.Tensor]:
        own = [shards[self.rank] for shards in handles]
        progress = [self._progress.handle] if self._progress else []
        return self.function([*progress, *inputs, *own, *self._constants])

    def reached(self) -> TaskProgress | None:
        """The task of a pipeline that the step is at; any thread may ask while it runs."""
        return self._progress.reached() if self._progress else None


class _Linker(Linker):
    """One rank."""

    def __init__(
        self,
        program: LocalProgram,
        group: Group,
        devices: Sequence[str],
        transport: Transport,
        variable_holders: Sequence[Sequence[int]],
        fed_in_parts: bool,
        progress: Progress | None = None,
    ) -> None:
        self.rank = group.index(transport.rank)
        super().__init__(program, group, devices, [self.rank], variable_holders)
        self._fed_in_parts = fed_in_parts
        self._transport = transport
        self._progress = progress
        self.constants: list[np.ndarray] = []

    def open(self, writer: FunctionWriter) -> None:
        super().open(writer)
        self._wire = Wire(writer, self._transport)

    def begin(self, writer: FunctionWriter) -> None:
        if self._progress is not None:
            self._progress.open(writer)
        super().begin(writer)

    def end(self) -> None:
        super().end()
        if self._progress is not None:
            self._progress.end()

    def _announced(self, op: Op, given: Sequence[str], control: Sequence[str]) -> Sequence[str]:
        task = task_of(op)
        if self._progress is None or task is None:
            return control
        return [self._progress.before(op.name, task, given, control)]

    def inner(self, program: LocalProgram) -> _Linker:
        return _Linker(program, self.group, self.devices, self._transport, (), self._fed_in_parts)

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
        ranks = next(g for g in self.mesh.groups(op.attrs["axes"]) if self.rank in g)
        group = tuple(self.group[rank] for rank in ranks)
        edges, wire, dtype = self.edges[self.rank], self._wire, op.inputs[0].dtype
        shape_on = self.program.shape_on
        operands = [WireOperand(edges[t], shape_on(self.rank, t)) for t in op.inputs if t in edges]
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
        elif op.type == "Permute":
            (operand,), at = operands, ranks.index(self.rank)
            sent, received = permuted_channels(op, group)[at]
            results = [wire.permute(operand, dtype, sent, received, self._awaited(op))]
        else:
            results = [
                wire.broadcast(f"{op.name}/{i}", self._known(f"{op.name}/{i}", t), t.dtype, group)
                for i, t in enumerate(op.inputs)
            ]
        edges.update(zip(op.outputs, results, strict=True))

    def _send(self, op: Op) -> None:
        channel, (tensor,) = channels_of(op, self.group)[self.rank], op.inputs
        edge = self.edges[self.rank][tensor]
        if channel is None:
            # Others of the group send it, and what it is made of may be a collective of them all.
            node, _, output = edge.partition(":")
            if output:
                self.nodes[self.rank][op] = node
            return
        operand = WireOperand(edge, self.program.shape_on(self.rank, tensor))
        self.nodes[self.rank][op] = self._wire.send(
            operand, tensor.dtype, channel, self._awaited(op)
        )

    def _recv(self, op: Op) -> None:
        channel, (tensor,) = channels_of(op, self.group)[self.rank], op.outputs
        if channel is None:
            self.edges[self.rank][tensor] = self._empty(op, self.rank)
            return
        shape = self.program.shape_on(self.rank, tensor)
        received = self._wire.recv(shape, tensor.dtype, channel, self._awaited(op))
        self.edges[self.rank][tensor] = received

    def _awaited(self, op: Op) -> list[str]:
        """The nodes that `op` waits for beside those of its operands."""
        nodes = self.nodes[self.rank]
        return list(dict.fromkeys(nodes[c] for c in op.control if c in nodes))

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


# --- Progress of a rank within a pipeline step ---
#
# Before each task the step assigns a number to a variable, once the task before it has ended, and
# another once all is there that the task reads:
#
#     call of 1F0  ->  progress = 3 (1F1 waits)  ->  progress = 4 (1F1 runs)  ->  call of 1F1
#                      what 1F1 reads            ->
#
# These are ops like others, of about a microsecond: the step never enters Python, and the thread
# that looks needs nothing of it. So what a rank was at is known when it hangs or is killed, too.


class Progress:
    """Progress of one rank in one program."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._variable = plain_variable(tf.constant(0, tf.int64))
        self._stands_for: list[TaskProgress | None] = [None]
        self._last: tuple[str, str] | None = None  # call, and its task

    @classmethod
    def of(cls, program: LocalProgram) -> Progress | None:
        """Return the progress of a program that calls the tasks of a pipeline; None for others."""
        return cls() if any(map(task_of, program.graph.ops)) else None

    @property
    def handle(self) -> tf.Tensor:
        """The variable's; what a function is given as its argument `progress`."""
        return self._variable.handle

    def reached(self) -> TaskProgress | None:
        """The task that the program is at; None before the first. Any thread may ask."""
        at = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=tf.int64)
        return self._stands_for[int(at)]

    def open(self, writer: FunctionWriter) -> None:
        """Add the argument to the function of the program, to which all else is added then."""
        self._writer = writer
        self._argument = writer.argument(_ARGUMENT, "resource", (), "int64")

    def before(self, call: str, task: str, edges: Sequence[str], control: Sequence[str]) -> str:
        """Announce a task; gives the node that its call has to wait for.

        Args:
            call: the node that will run it.
            edges: that it reads.
            control: nodes that it waits for.
        """
        before = [self._last[0]] if self._last else []  # in a new round it need not wait for that
        nodes = [*dict.fromkeys([*control, *before])]
        waits = self._assign(f"{call}/waits", TaskProgress(task, "waits"), nodes)
        made = dict.fromkeys(
            node for node, _, output in (e.partition(":") for e in edges) if output
        )
        self._last = call, task
        return self._assign(f"{call}/runs", TaskProgress(task, "runs"), [waits, *made])

    def end(self) -> None:
        """Announce that the last task has ended, once it has."""
        if self._last is not None:
            call, task = self._last
            node = self._assign(f"{call}/done", TaskProgress(task, "done"), [call])
            self._writer.effect(node)

    def _assign(self, name: str, reached: TaskProgress, control: Sequence[str]) -> str:
        device = self._variable.device
        value = const_attrs(np.int64(len(self._stands_for)), "int64")
        self._stands_for.append(reached)
        self._writer.node(f"{name}/number", "Const", (), value, device)
        attrs = serialize_attrs({"dtype": DType("int64")})
        inputs = [self._argument, f"{name}/number:output:0"]
        self._writer.node(name, "AssignVariableOp", inputs, attrs, device, control)
        return name


def task_of(op: Op) -> str | None:
    """The task of a pipeline that `op` calls, as schedules write it; None if it calls none."""
    return op.attrs.get("task") if op.type == TASK else None


_ARGUMENT = "progress"
