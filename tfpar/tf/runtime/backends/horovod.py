"""Transport over Horovod: NCCL between GPUs, Gloo or MPI between CPUs.

Only its raw collectives and process sets are used; its Keras wrapper trains wrong on Keras 3.
Ranks agree by name on what runs next, so no order of the graph can deadlock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.process_sets import ProcessSet, global_process_set

from tfpar.compile.local.transfers import Channel
from tfpar.ir.graph import DType
from tfpar.tf.runtime.function_def import FunctionWriter, const_attrs, serialize_attrs

_REDUCTIONS = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "prod": hvd.Product}


class HorovodTransport:
    """A `Transport` over Horovod, which is started here and must not have been before.

    Args:
        device: where this rank computes.
        num_ranks: of the job.
    """

    name = "horovod"

    def __init__(self, device: str, num_ranks: int) -> None:
        # Process sets are made when the mesh is known, long after the start. Two ranks need none:
        # all groups are the whole job. With dynamic sets, Horovod's background threads ask each
        # other a thousand times a second whether there is a new one, which doubles what they use.
        if num_ranks > 2:
            os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
        hvd.init()
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.device = device
        # Gloo's overwrites what it is still sending (`ReduceScatterHalvingDoubling::run` moves its
        # result within the buffer without waiting for its sends): wrong sums, now and then.
        over_gloo = "GPU" not in device and not hvd.mpi_enabled()
        self.reductions: Sequence[str] = () if over_gloo else ("sum",)
        self._sets: dict[tuple[int, ...], ProcessSet] = {
            tuple(range(self.size)): global_process_set
        }

    def connect(self, groups: Sequence[tuple[int, ...]], channels: Sequence[Channel] = ()) -> None:
        for members in map(_members, (*groups, *(c[:2] for c in channels))):
            if len(members) > 1 and members not in self._sets:
                self._sets[members] = hvd.add_process_set(members)

    def close(self) -> None:
        hvd.shutdown()

    # --- collectives -------------------------------------------------------------

    def all_reduce(
        self,
        writer: FunctionWriter,
        name: str,
        edges: Sequence[str],
        dtype: str,
        reduction: str,
        group: tuple[int, ...],
    ) -> list[str]:
        attrs = {
            "T": DType(dtype),
            "reduce_op": int(_REDUCTIONS[reduction]),
            "prescale_factor": 1.0,
            "postscale_factor": 1.0,
            "num_tensors": len(edges),
        }
        self._emit(writer, name, "HorovodGroupedAllreduce", edges, attrs, group)
        return [f"{name}:sum:{i}" for i in range(len(edges))]

    def all_gather(
        self, writer: FunctionWriter, name: str, edge: str, dtype: str, group: tuple[int, ...]
    ) -> str:
        self._emit(writer, name, "HorovodAllgather", [edge], {"T": DType(dtype)}, group)
        return f"{name}:output:0"

    def reduce_scatter(
        self,
        writer: FunctionWriter,
        name: str,
        edge: str,
        dtype: str,
        reduction: str,
        group: tuple[int, ...],
    ) -> str:
        attrs = {
            "T": DType(dtype),
            "reduce_op": int(_REDUCTIONS[reduction]),
            "prescale_factor": 1.0,
            "postscale_factor": 1.0,
        }
        self._emit(writer, name, "HorovodReducescatter", [edge], attrs, group)
        return f"{name}:output:0"

    def all_to_all(
        self, writer: FunctionWriter, name: str, edge: str, dtype: str, group: tuple[int, ...]
    ) -> str:
        equal = f"{name}/splits"  # none given: equal blocks
        attrs = const_attrs(tf.zeros([0], tf.int32).numpy(), "int32")
        writer.node(equal, "Const", (), attrs, "/device:CPU:0")
        inputs = [edge, f"{equal}:output:0"]
        self._emit(writer, name, "HorovodAlltoall", inputs, {"T": DType(dtype)}, group)
        return f"{name}:output:0"

    def broadcast(
        self, writer: FunctionWriter, name: str, edge: str, dtype: str, group: tuple[int, ...]
    ) -> str:
        attrs = {"T": DType(dtype), "root_rank": group[0]}
        self._emit(writer, name, "HorovodBroadcast", [edge], attrs, group)
        return f"{name}:output:0"

    # --- transfers: a broadcast in a set of two, matched by the name of the channel ------

    def send(self, writer: FunctionWriter, edge: str, dtype: str, channel: Channel) -> str:
        self._broadcast(writer, channel, edge, dtype)
        return channel.name

    def recv(self, writer: FunctionWriter, shape: str, dtype: str, channel: Channel) -> str:
        # `Empty` writes nothing and is no constant, of which TensorFlow could fold the broadcast.
        blank = f"{channel.name}/blank"
        attrs = serialize_attrs({"dtype": DType(dtype), "init": False})
        writer.node(blank, "Empty", [shape], attrs, self.device)
        self._broadcast(writer, channel, f"{blank}:output:0", dtype)
        return f"{channel.name}:output:0"

    def _broadcast(self, writer: FunctionWriter, channel: Channel, edge: str, dtype: str) -> None:
        # What else is sent of the same tensor looks the same to TensorFlow, which would merge both;
        # the ranks that receive have two all the same.
        attrs = {"T": DType(dtype), "root_rank": channel.source, "_tfpar_channel": channel.name}
        self._emit(writer, channel.name, "HorovodBroadcast", [edge], attrs, channel[:2])

    def _emit(
        self,
        writer: FunctionWriter,
        name: str,
        op_type: str,
        inputs: Sequence[str],
        attrs: dict,
        group: tuple[int, ...],
    ) -> None:
        process_set = self._sets[_members(group)].process_set_id
        common = {"ignore_name_scope": False, "process_set_id": process_set}
        writer.node(name, op_type, inputs, serialize_attrs({**attrs, **common}), self.device)


def _members(group: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of a group in their order: Horovod has one set of the same ones."""
    return tuple(sorted(group))
