"""Transport over TensorFlow's own collectives: NCCL between GPUs, gRPC between CPUs.

Nothing has to be built. Ranks meet by two keys, of the group and of the collective in it. Each
rank counts them for itself, which agrees as all ranks make the same groups in the same order, and
those of a group write the same collectives in the same order. What one rank sends another is a
broadcast in a group of two, one for each ordered pair; its key is given with its channel, so
that both may write their transfers in any order.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import cluster_pb2, tensorflow_server_pb2

from tfpar.compile.local.transfers import Channel
from tfpar.ir.graph import DType
from tfpar.jobs.launch import environment as names
from tfpar.spec import TfparError
from tfpar.tf.distributed.job import Job
from tfpar.tf.interop import runtime
from tfpar.tf.runtime.backends.grpc_access import choose_filter
from tfpar.tf.runtime.devices import own_device
from tfpar.tf.runtime.function_def import FunctionWriter, const_attrs, serialize_attrs

_JOB = "worker"
# A collective ends on its sender before its last bytes have left: one that exited at once was seen
# to fail the others.
_LINGER_S = 0.2
_MERGE = {"sum": "Add", "prod": "Mul", "max": "Max", "min": "Min"}

Group = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The group of two in which one rank sends to the other; no other collective runs in it."""

    source: int
    target: int


class TensorFlowTransport:
    """A `Transport` over TensorFlow's collective ops, whose server is started here.

    Args:
        job: with the address of every rank. This one listens at its own.
        peers: the addresses from which ranks connect, see `grpc_access.choose_filter`.

    Raises:
        TfparError: addresses are missing, this rank's cannot be listened at, TensorFlow's runtime
            has started before, or strangers would reach it.
    """

    name = "tensorflow"

    def __init__(self, job: Job, peers: Callable[[], Collection[str] | None]) -> None:
        _check(job)
        peer_filter = choose_filter(job, peers)
        device = own_device(job.local_rank, job.local_size).rpartition("/device:")[2]
        self._on_gpu = device.startswith("GPU")
        # TensorFlow has no reduce-scatter on CPUs.
        self.reductions: Sequence[str] = tuple(_MERGE) if self._on_gpu else ()
        _start_server(job, self._on_gpu)
        if peer_filter is not None:
            peer_filter.attach(int(job.addresses[job.rank].rpartition(":")[2]))
        self.rank = job.rank
        self.size = job.size
        self.device = f"{_task(job.rank)}/device:{device}"
        self._timeout_s = _timeout_s()
        self._group_keys: dict[Group | _Pair, int] = {}
        self._written: Counter[Group | _Pair] = Counter()
        self._channels: dict[Channel, int] = {}
        self._last: weakref.WeakKeyDictionary[FunctionWriter, str] = weakref.WeakKeyDictionary()
        atexit.register(self.close)

    def connect(self, groups: Sequence[Group], channels: Sequence[Channel] = ()) -> None:
        pairs = [_Pair(c.source, c.target) for c in channels]
        wanted: list[Group | _Pair] = [*groups, *pairs]
        for group in wanted:
            self._group_keys.setdefault(group, len(self._group_keys) + 1)
        for channel, pair in zip(channels, pairs, strict=True):
            self._written[pair] += 1
            self._channels[channel] = self._written[pair]

    def close(self) -> None:
        """Give what was sent last the time to arrive; the server ends with the process."""
        time.sleep(_LINGER_S)

    # --- collectives -------------------------------------------------------------

    def all_reduce(
        self,
        writer: FunctionWriter,
        name: str,
        edges: Sequence[str],
        dtype: str,
        reduction: str,
        group: Group,
    ) -> list[str]:
        nodes = self._nodes(writer, name, dtype)
        if len(edges) == 1:
            return [self._reduce(nodes, "CollectiveReduceV2", edges[0], reduction, group)]
        # One message: each would cost the same few milliseconds, however small.
        flat = [nodes.reshape(f"flat{i}", edge, [-1]) for i, edge in enumerate(edges)]
        packed = nodes.concat("packed", flat)
        reduced = self._reduce(nodes, "CollectiveReduceV2", packed, reduction, group)
        parts = nodes.split_like("parts", reduced, flat)
        return [
            nodes.reshape(f"whole{i}", part, nodes.shape(f"shape{i}", edge))
            for i, (part, edge) in enumerate(zip(parts, edges, strict=True))
        ]

    def all_gather(
        self, writer: FunctionWriter, name: str, edge: str, dtype: str, group: Group
    ) -> str:
        nodes = self._nodes(writer, name, dtype)
        row = nodes.reshape("row", edge, [1, -1])
        inputs = [nodes.fill_rows("filled", row), *self._keys(nodes, group)]
        gathered = self._emit(nodes, "CollectiveGatherV2", inputs)
        rows = nodes.slice("rows", gathered, nodes.longer_shape("of_rows", row, len(group)))
        return nodes.reshape("joined", rows, nodes.longer_shape("of_joined", edge, len(group)))

    def reduce_scatter(
        self,
        writer: FunctionWriter,
        name: str,
        edge: str,
        dtype: str,
        reduction: str,
        group: Group,
    ) -> str:
        nodes = self._nodes(writer, name, dtype)
        return self._reduce(nodes, "CollectiveReduceScatterV2", edge, reduction, group)

    def all_to_all(
        self, writer: FunctionWriter, name: str, edge: str, dtype: str, group: Group
    ) -> str:
        nodes = self._nodes(writer, name, dtype)
        rows = self._exchange_rows(nodes, edge, group)
        return nodes.reshape("blocks", rows, nodes.shape("of_blocks", edge))

    def broadcast(
        self, writer: FunctionWriter, name: str, edge: str, dtype: str, group: Group
    ) -> str:
        nodes = self._nodes(writer, name, dtype)
        keys = self._keys(nodes, group)
        if self.rank == group[0]:
            return self._emit(nodes, "CollectiveBcastSendV2", [edge, *keys])
        inputs = [*keys, nodes.shape("shape", edge)]
        return self._emit(nodes, "CollectiveBcastRecvV2", inputs, Tshape=DType("int32"))

    # --- transfers -----------------------------------------------------------------

    def send(self, writer: FunctionWriter, edge: str, dtype: str, channel: Channel) -> str:
        nodes = self._nodes(writer, channel.name, dtype)
        inputs = [edge, *self._channel_keys(nodes, channel)]
        self._emit(nodes, "CollectiveBcastSendV2", inputs, in_order=False)
        return channel.name

    def recv(self, writer: FunctionWriter, shape: str, dtype: str, channel: Channel) -> str:
        nodes = self._nodes(writer, channel.name, dtype)
        inputs = [*self._channel_keys(nodes, channel), shape]
        attrs = {"Tshape": DType("int32")}
        return self._emit(nodes, "CollectiveBcastRecvV2", inputs, in_order=False, **attrs)

    def _channel_keys(self, nodes: _Nodes, channel: Channel) -> list[str]:
        group_key = self._group_keys[_Pair(channel.source, channel.target)]
        return _key_nodes(nodes, 2, group_key, self._channels[channel])

    # --- nodes -----------------------------------------------------------------------

    def _reduce(self, nodes: _Nodes, op_type: str, edge: str, reduction: str, group: Group) -> str:
        inputs = [edge, *self._keys(nodes, group)]
        return self._emit(nodes, op_type, inputs, merge_op=_MERGE[reduction], final_op="Id")

    def _exchange_rows(self, nodes: _Nodes, edge: str, group: Group) -> str:
        """The blocks meant for this rank, each a row of a matrix."""
        rows = nodes.reshape("rows", edge, [len(group), -1])
        filled = nodes.fill_rows("filled", rows)
        keys = self._keys(nodes, group)
        done = self._emit(nodes, "CollectiveAllToAllV2", [filled, *keys])
        return nodes.slice("received", done, nodes.shape("of_received", rows))

    def _keys(self, nodes: _Nodes, group: Group) -> list[str]:
        """Write the keys by which ranks meet in the group's next collective: size and two keys."""
        self._written[group] += 1
        return _key_nodes(nodes, len(group), self._group_keys[group], self._written[group])

    def _nodes(self, writer: FunctionWriter, name: str, dtype: str) -> _Nodes:
        return _Nodes(writer, name, dtype, self.device, f"{_task(self.rank)}/device:CPU:0")

    def _emit(
        self,
        nodes: _Nodes,
        op_type: str,
        inputs: Sequence[str],
        in_order: bool = True,
        **attrs: Any,
    ) -> str:
        """A collective; one that is not `in_order` neither waits for others nor is waited for."""
        hint = "nccl" if self._on_gpu else "ring"
        # Two threads wait for the timeout of each call to pass, even of one that is over at once:
        # some hundreds of quick steps would use up what a process may have.
        timeout_s = 0.0 if nodes.writer.bounded else self._timeout_s
        attrs |= {"communication_hint": hint, "timeout_seconds": timeout_s}
        control = []
        if (
            self._on_gpu and in_order
        ):  # NCCL wants one order on all ranks: that in which they are written
            last = self._last.get(nodes.writer)
            control = [last] if last else []
            self._last[nodes.writer] = nodes.name
        return nodes.emit("", op_type, inputs, attrs, "data", control)


class _Nodes:
    """Writer of the nodes of one collective, under its name.

    Args:
        writer: of the function.
        name: of the collective.
        dtype: of what it carries.
        device: where that is.
        host: the device of shapes and other small whole numbers.
    """

    def __init__(
        self, writer: FunctionWriter, name: str, dtype: str, device: str, host: str
    ) -> None:
        self.writer = writer
        self.name = name
        self._dtype = dtype
        self._device = device
        self._host = host

    def emit(
        self,
        role: str,
        op_type: str,
        inputs: Sequence[str],
        attrs: dict[str, Any],
        output: str = "output",
        control: Sequence[str] = (),
    ) -> str:
        """A node called after its role in the collective; returns its first output."""
        attrs = {"T": DType(self._dtype), **attrs}
        name = self._name(role)
        self.writer.node(name, op_type, inputs, serialize_attrs(attrs), self._device, control)
        return f"{name}:{output}:0"

    def const(self, role: str, value: Any) -> str:
        attrs = const_attrs(np.asarray(value, np.int32), "int32")
        self.writer.node(self._name(role), "Const", (), attrs, self._host)
        return f"{self._name(role)}:output:0"

    def shape(self, role: str, edge: str) -> str:
        return self.emit(role, "Shape", [edge], {"out_type": DType("int32")})

    def longer_shape(self, role: str, edge: str, times: int) -> str:
        """The shape of the tensor if its dim 0 were so many times as long."""
        ints = self._integers(role)
        shape = self.shape(f"{role}/shape", edge)
        rank = ints.emit("rank", "Size", [shape], {"out_type": DType("int32")})
        factors = [ints.const("dim", 0), rank, ints.const("times", times), ints.const("once", 1)]
        attrs = {"axis": -1, "TI": DType("int32")}
        return ints.emit(
            "", "Mul", [shape, ints.emit("factors", "OneHot", factors, attrs)], {}, "z"
        )

    def reshape(self, role: str, edge: str, shape: str | Sequence[int]) -> str:
        shape = shape if isinstance(shape, str) else self.const(f"{role}/shape", shape)
        return self.emit(role, "Reshape", [edge, shape], {"Tshape": DType("int32")})

    def slice(self, role: str, edge: str, shape: str) -> str:
        """The upper left part, of that shape, of a matrix."""
        inputs = [edge, self.const(f"{role}/from", [0, 0]), shape]
        return self.emit(role, "Slice", inputs, {"Index": DType("int32")})

    def concat(self, role: str, edges: Sequence[str]) -> str:
        attrs = {"N": len(edges), "Tidx": DType("int32")}
        return self.emit(role, "ConcatV2", [*edges, self.const(f"{role}/dim", 0)], attrs)

    def split_like(self, role: str, edge: str, like: Sequence[str]) -> list[str]:
        """Cut a vector as the vectors `like` are long."""
        lengths = [self.shape(f"{role}/length{i}", e) for i, e in enumerate(like)]
        sizes = self._integers(role).concat("sizes", lengths)
        attrs = {"num_split": len(like), "Tlen": DType("int32")}
        self.emit(role, "SplitV", [edge, sizes, self.const(f"{role}/dim", 0)], attrs)
        return [f"{self._name(role)}:output:{i}" for i in range(len(like))]

    def fill_rows(self, role: str, edge: str) -> str:
        """The matrix, with a column of zeros if it has none: TensorFlow crashes on empty rows."""
        ints = self._integers(role)
        size = self.emit(f"{role}/size", "Size", [edge], {"out_type": DType("int32")})
        empty = ints.emit("empty", "Equal", [size, ints.const("none", 0)], {}, "z")
        attrs = {"SrcT": DType("bool"), "DstT": DType("int32"), "T": None}
        columns = ints.emit("columns", "Cast", [empty], attrs, "y")
        right = ints.const("right", [[0, 0], [0, 1]])
        paddings = ints.emit("paddings", "Mul", [columns, right], {}, "z")
        return self.emit(role, "Pad", [edge, paddings], {"Tpaddings": DType("int32")})

    def _integers(self, role: str) -> _Nodes:
        """Writes nodes of whole numbers, under the name that the role has."""
        return _Nodes(self.writer, self._name(role), "int32", self._host, self._host)

    def _name(self, role: str) -> str:
        return f"{self.name}/tensorflow/{role}" if role else self.name


def _key_nodes(nodes: _Nodes, group_size: int, group_key: int, instance_key: int) -> list[str]:
    keys = {"group_size": group_size, "group_key": group_key, "instance_key": instance_key}
    return [nodes.const(key, value) for key, value in keys.items()]


def _task(rank: int) -> str:
    return f"/job:{_JOB}/replica:0/task:{rank}"


def _check(job: Job) -> None:
    if len(job.addresses) != job.size:
        raise TfparError(
            f"The backend 'tensorflow' needs the address of each of the {job.size} ranks, and "
            f"{job.launcher} gives {len(job.addresses)}. Start the program with `tfpar run "
            f"--backend tensorflow`, set {names.ADDRESSES} to host:port of each rank, in their "
            f"order and separated by commas, or use --backend horovod."
        )
    if runtime.is_started():
        raise TfparError(
            "The backend 'tensorflow' has to be started before TensorFlow computes anything. "
            "Enter tfpar.auto_parallel before the first tensor, variable or dataset is made, "
            "or use --backend horovod."
        )


def _start_server(job: Job, on_gpu: bool) -> None:
    """Start TensorFlow's runtime as a task of the job's cluster; waits for no other rank."""
    server = tensorflow_server_pb2.ServerDef(
        cluster=_cluster(job.addresses),
        job_name=_JOB,
        task_index=job.rank,
        protocol="grpc",
    )
    address = job.addresses[job.rank]
    try:
        runtime.start_server(server, _task(0), _task(job.rank), use_nccl=on_gpu)
    except tf.errors.OpError as error:
        raise TfparError(
            f"Rank {job.rank} cannot listen at {address}: {error.message} Is the port in use, or "
            f"the address that of another machine?"
        ) from error


def _cluster(addresses: Sequence[str]) -> cluster_pb2.ClusterDef:
    cluster = cluster_pb2.ClusterDef()
    tasks = cluster.job.add(name=_JOB).tasks
    for rank, address in enumerate(addresses):
        tasks[rank] = address
    return cluster


def _timeout_s() -> float:
    """Return a timeout some time after that of the rank's watchdog, which can say more."""
    timeout = float(os.environ.get(names.TIMEOUT, names.DEFAULT_TIMEOUT_S))
    return timeout + max(10.0, timeout / 10)
