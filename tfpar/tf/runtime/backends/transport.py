"""Transport of collectives between processes: the interface that every backend implements.

A transport writes nodes into functions, so that the step of a rank and a collective outside of a
step (`Exchange`) go the same way. `wire.Wire` makes of these five collectives, and of what two
ranks send each other, what programs ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tfpar.compile.local.transfers import Channel
from tfpar.tf.runtime.function_def import FunctionWriter

WIRE_DTYPES = ("int32", "int64", "float16", "float32", "float64")
"""The dtypes that every transport carries and adds up."""


class Connections(NamedTuple):
    """Groups and channels that programs need between ranks; `Transport.connect` sets them up."""

    groups: Sequence[tuple[int, ...]]
    channels: Sequence[Channel] = ()


class Transport(Protocol):
    """Collectives among the processes of a job.

    A *group* is an ordered tuple of ranks. Tensors are of `WIRE_DTYPES`, blocks of equal shape on
    all ranks and in every run of a function, and split or joined along dim 0. Methods that write
    nodes return edges of the function being written; every rank writes the same nodes under the
    same names. What is a constant on one rank is one on all: TensorFlow may run a collective of
    constants only once, while it optimizes the function.

    What two ranks send each other they write alone. Both ends meet by their channel, in whatever
    order they were written and begin. A rank that has gone, or does not come in time, ends a
    `send` or `recv` with an error, as any collective.

    Attributes:
        name: of the backend, as users know it.
        rank, size: this process among all.
        device: where this rank computes, as TensorFlow names it here.
        reductions: what `reduce_scatter` can do, perhaps nothing; `all_reduce` does `sum`, `prod`,
            `max`, `min`.
    """

    name: str
    rank: int
    size: int
    device: str
    reductions: Sequence[str]

    def connect(self, groups: Sequence[tuple[int, ...]], channels: Sequence[Channel] = ()) -> None:
        """Make groups that do not exist yet, and channels for the next function that uses them.

        Every rank calls it with the same ones in the same order, also with those that it is no
        part of.
        """

    def all_reduce(
        self,
        writer: FunctionWriter,
        name: str,
        edges: Sequence[str],
        dtype: str,
        reduction: str,
        group: tuple[int, ...],
    ) -> list[str]:
        """Reduce each of several tensors; they may travel as one buffer."""
        ...

    def all_gather(
        self, writer: FunctionWriter, name: str, edge: str, dtype: str, group: tuple[int, ...]
    ) -> str:
        """The tensors of the group, in its order, one after the other."""
        ...

    def reduce_scatter(
        self,
        writer: FunctionWriter,
        name: str,
        edge: str,
        dtype: str,
        reduction: str,
        group: tuple[int, ...],
    ) -> str:
        """Return this rank's block of the reduced tensor."""
        ...

    def all_to_all(
        self, writer: FunctionWriter, name: str, edge: str, dtype: str, group: tuple[int, ...]
    ) -> str:
        """The blocks meant for this rank, in the order of the group."""
        ...

    def broadcast(
        self, writer: FunctionWriter, name: str, edge: str, dtype: str, group: tuple[int, ...]
    ) -> str:
        """The tensor of the first rank of the group."""
        ...

    def send(self, writer: FunctionWriter, edge: str, dtype: str, channel: Channel) -> str:
        """The node that gives the tensor to the target of the channel.

        It may end only once the target has come: nothing but the end of the function waits for it.
        """
        ...

    def recv(self, writer: FunctionWriter, shape: str, dtype: str, channel: Channel) -> str:
        """The tensor that the source of the channel sends.

        Args:
            shape: the edge of its shape, as int32s.
        """
        ...

    def close(self) -> None:
        """Leave the job; nothing can be sent afterwards."""
