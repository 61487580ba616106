"""Records of the chosen steps, made by each rank: plain values that ranks send to the first one.

Times are nanoseconds of the clock of the rank's machine.
"""

from __future__ import annotations

import base64
import zlib

import msgspec


class OpSpan(msgspec.Struct, array_like=True, frozen=True):
    """An op, or a task of a pipeline, that a rank ran.

    Attributes:
        name: the Keras path of its layer; of a task what schedules call it.
        what: the type of the op.
    """

    start: int
    end: int
    name: str
    what: str
    phase: str


class CollectiveKind(msgspec.Struct, array_like=True, frozen=True):
    """A collective or a transfer of the program, as its ranks know it.

    Attributes:
        key: tells it from all others of the step; the same on all ranks.
        group: the ranks of the job that take part.
        layers: the Keras paths of those whose tensors it moves; who receives does not know them.
        axes: of the mesh; none of a transfer.
        num_bytes: payload on one rank.
        predicted_s: what the cluster's figures say that it takes; None without a cluster.
    """

    key: str
    group: tuple[int, ...]
    layers: tuple[str, ...]
    what: str
    axes: tuple[str, ...]
    num_bytes: int
    phase: str
    predicted_s: float | None

    def named(self, layers: tuple[str, ...]) -> str:
        """The first of its layers, how many more there are, and what it does."""
        more = f" + {len(layers) - 1}" if len(layers) > 1 else ""
        return f"{layers[0]}{more} {self.what}"


class CollectiveSpan(msgspec.Struct, array_like=True, frozen=True):
    """A collective or transfer that a rank took part in.

    Attributes:
        nth: how often it ran before, in its step.
        arrived: when this rank was ready for it.
    """

    kind: CollectiveKind
    nth: int
    arrived: int
    end: int


class StepOfRank(msgspec.Struct, array_like=True, frozen=True):
    """A step of a rank: its number, as Keras counts, from `start` to `end`, and what ran."""

    number: int
    start: int
    end: int
    ran: list[OpSpan]
    tasks: list[OpSpan]
    met: list[CollectiveSpan]


class RankTrace(msgspec.Struct, array_like=True, frozen=True):
    """Trace of one rank.

    Attributes:
        clock: the machine whose clock it read: those of other machines go differently.
    """

    rank: int
    clock: str
    steps: list[StepOfRank]


def encode_traces(records: list[RankTrace]) -> str:
    """Records as text, for a message."""
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(records), 1)).decode()


def decode_traces(text: str) -> list[RankTrace]:
    """Inverse of `encode_traces`."""
    return msgspec.msgpack.decode(zlib.decompress(base64.b64decode(text)), type=list[RankTrace])
