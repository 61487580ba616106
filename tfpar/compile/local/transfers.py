"""Transfers: what a rank of one local program sends to a rank of another.

Both sides are ops of their own. `Send` has one operand and no output, and goes to one rank for each
rank of its program; `Recv` has no operand and one output, of known shape. They meet by a *channel*:
the sending rank, the receiving one, and a key that both name. Where all ranks are in one process, a
transfer is an edge from the operand to the output.

Nothing waits for a `Send` but the end of the step. Between processes it ends when the receiver has
come, so that two ranks which both waited for what they send would wait forever.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tfpar.compile.local.local_graph import LocalProgram
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import Op, Tensor
from tfpar.spec import RuntimeMismatchError, TfparError

TRANSFER_TYPES = ("Send", "Recv")

_KEY = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\-/]*")


class Channel(NamedTuple):
    """The way of one tensor, once in each run of a step.

    Attributes:
        source, target: ranks of the job.
        key: what tells the channels between two ranks apart, spelled as names of ops are.
    """

    source: int
    target: int
    key: str

    @property
    def name(self) -> str:
        """The same at both ends, and of no other channel."""
        return f"transfer/{self.source}_to_{self.target}/{self.key}"


def permuted_channels(op: Op, group: Sequence[int]) -> list[tuple[Channel | None, Channel | None]]:
    """Return, by place in a group of ranks of the job, the channels in which a `Permute` has a rank
    send and receive; None for a rank that keeps what it has."""
    targets = op.attrs["targets"]
    sent = [
        None if target == at else Channel(rank, group[target], op.name)
        for at, (rank, target) in enumerate(zip(group, targets, strict=True))
    ]
    return [(channel, sent[targets.index(at)]) for at, channel in enumerate(sent)]


class ChannelEnd(NamedTuple):
    """One end of a channel, and what comes along. Plain values, for ranks to exchange.

    Attributes:
        op: name of the `Send` or `Recv`.
    """

    source: int
    target: int
    key: str
    op: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def channel(self) -> Channel:
        return Channel(self.source, self.target, self.key)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} (op {self.op!r})"


def send(
    build: GraphBuilder,
    x: Tensor,
    key: str,
    targets: Sequence[int | None],
    control: Sequence[Op] = (),
) -> Op:
    """Append a `Send` of `x`.

    Args:
        targets: for each rank of the program, the rank of the job that gets its `x`; None if none
            does.
        control: what it begins after.

    Raises:
        TfparError: the shape of `x` is unknown, or the key is not spelled as an op's name.
    """
    attrs = {"key": _checked(key, x.shape, x.is_static), "targets": tuple(targets)}
    op = build.emit("Send", (x,), (), attrs, f"{build.name}/Send", control, stateful=True)
    build.graph.effects.append(op)  # or it would be left out, as nobody reads it
    return op


def recv(
    build: GraphBuilder,
    shape: Sequence[int],
    dtype: str,
    key: str,
    sources: Sequence[int | None],
    control: Sequence[Op] = (),
) -> Tensor:
    """Append a `Recv` of a tensor that other ranks send.

    Args:
        sources: for each rank of the program, the rank of the job that it gets its tensor from;
            None where it gets none, as its tensor has no entries.
        control: what it begins after.

    Raises:
        TfparError: the shape is not known, or the key is not spelled as an op's name.
    """
    attrs = {"key": _checked(key, shape, None not in shape), "sources": tuple(sources)}
    outputs = [(tuple(shape), dtype)]
    op = build.emit("Recv", (), outputs, attrs, f"{build.name}/Recv", control, stateful=True)
    return op.outputs[0]


def channels_of(op: Op, ranks: Sequence[int]) -> list[Channel | None]:
    """Return for each rank of its program the channel of a `Send` or `Recv`; None where none is
    used.

    Args:
        ranks: of the job, which run the program.
    """
    key = op.attrs["key"]
    if op.type == "Recv":
        pairs = zip(op.attrs["sources"], ranks, strict=True)
        return [None if source is None else Channel(source, rank, key) for source, rank in pairs]
    pairs = zip(ranks, op.attrs["targets"], strict=True)
    return [None if target is None else Channel(rank, target, key) for rank, target in pairs]


def ends_of(program: LocalProgram, ranks: Sequence[int], op_type: str) -> list[ChannelEnd]:
    """Return the ends of all channels at which the program of `ranks` has a `Send`, or a `Recv`."""
    found = []
    for op in program.graph.ops:
        if op.type == op_type:
            (tensor,) = op.inputs or op.outputs
            found += [
                ChannelEnd(*channel, op.name, program.shape_on(rank, tensor), tensor.dtype)
                for rank, channel in enumerate(channels_of(op, ranks))
                if channel
            ]
    return found


def match_channels(sends: Sequence[ChannelEnd], receives: Sequence[ChannelEnd]) -> list[Channel]:
    """Match channels, in the order of `sends`, each with one `Send` and one `Recv` of one shape.

    Raises:
        RuntimeMismatchError: names the first that has not.
    """
    sent, awaited = _by_channel(sends, "sent"), _by_channel(receives, "received")
    for channel, end in sent.items():
        source, target, key = channel
        other = awaited.get(channel)
        if other is None:
            raise RuntimeMismatchError(
                f"Rank {source} sends {key!r}, {end}, to rank {target}, which does not receive it."
            )
        if (end.shape, end.dtype) != (other.shape, other.dtype):
            raise RuntimeMismatchError(
                f"Rank {source} sends {key!r} as {end}; rank {target} receives it as {other}."
            )
    for (source, target, key), end in awaited.items():
        if Channel(source, target, key) not in sent:
            raise RuntimeMismatchError(
                f"Rank {target} receives {key!r}, {end}, from rank {source}, which does not "
                f"send it."
            )
    return list(sent)


def _by_channel(ends: Sequence[ChannelEnd], what: str) -> dict[Channel, ChannelEnd]:
    found: dict[Channel, ChannelEnd] = {}
    for end in ends:
        first = found.setdefault(end.channel, end)
        if first is not end:
            raise RuntimeMismatchError(
                f"{end.key!r} is {what} twice from rank {end.source} to rank {end.target}: by ops "
                f"{first.op!r} and {end.op!r}. Give each transfer a key of its own."
            )
    return found


def _checked(key: str, shape: Sequence[int] | None, known: bool) -> str:
    if not _KEY.fullmatch(key):
        raise TfparError(
            f"The key {key!r} of a transfer is not spelled as an op's name: letters, digits and "
            f"any of '_./-', the first a letter or digit."
        )
    if not known:
        raise TfparError(f"The transfer {key!r} has the shape {shape}; every size must be known.")
    return key
