"""Terms of a cost: the sums over the ops, collectives and variables of a step.

Terms are sums, so those of a step are the sums of those of its parts, whatever the parts are:
ops, segments, stages. What terms come to is no sum (packed collectives share buckets, and the
backward pass hides some of them; what runs at the same time starts once): `Pricer.cost` says it of
a whole step.

    terms = Terms(mesh.num_axes)
    terms.compute[FORWARD] += 2e-3
    terms.pack(When.BESIDE, "all_reduce", (0,), 4096)
    whole = terms + those_of_another_part

A search adds and subtracts thousands of them a second. So all numbers lie in one vector; only this
module knows in which order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import PACKED_KINDS, collective_seconds
from tfpar.cost.packing_gain import NOTHING, PackingSets
from tfpar.ir.roles import PHASES, When
from tfpar.spec import Mesh

_WHENS = (When.BESIDE, When.AFTER)


class PackedCollectives(NamedTuple):
    """Collectives of one kind and group that travel in the same buckets; see `Terms.pack`."""

    kind: str
    axes: tuple[int, ...]
    num_bytes: float


class _Number:
    """One term, by its place in the vector."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __get__(self, terms: Terms, owner: type[Terms]) -> float:
        return float(terms.vector[self.at])

    def __set__(self, terms: Terms, value: float) -> None:
        terms.vector[self.at] = value


class _ByPhase:
    """A term for each phase, by the place of the first of them."""

    def __init__(self, at: int) -> None:
        self.span = slice(at, at + len(PHASES))

    def __get__(self, terms: Terms, owner: type[Terms]) -> np.ndarray:
        return terms.vector[self.span]


class Terms:
    """Sums over some ops, reshards and variables, on one rank; at first all 0.

    Attributes:
        compute: seconds of ops, by phase (a view, to be added to).
        communication: seconds of collectives that are waited for, each by itself, by phase (a
            view).
        prefetched: of these, what may run beside the ops of the phase (a view).
        dispatch: seconds in which the host issues these ops, by phase (a view).
        count: how many collectives these are.
        together: those of them that are packed where several run at the same time.
        activation_bytes: of what the forward pass makes and the backward pass reads.
        weight_bytes, state_bytes: of variables, stored all the time; see `Cost`.
        host_slot_bytes, host_activation_bytes: in host memory; see `Cost`.

    Args:
        num_axes: of the mesh.
    """

    __slots__ = ("together", "vector")

    compute = _ByPhase(0)
    communication = _ByPhase(3)
    dispatch = _ByPhase(6)
    prefetched = _ByPhase(9)
    count = _Number(12)
    activation_bytes = _Number(13)
    weight_bytes = _Number(14)
    state_bytes = _Number(15)
    host_slot_bytes = _Number(16)
    host_activation_bytes = _Number(17)

    _SECONDS = slice(0, 12)
    _PACKED = slice(18, None)

    def __init__(self, num_axes: int) -> None:
        self.vector = np.zeros(self._PACKED.start + len(_WHENS) * len(PACKED_KINDS) * 2**num_axes)
        self.together = NOTHING

    # --- packed collectives: bytes by when, kind and a bit for each mesh axis --------

    def pack(self, when: When, kind: str, axes: tuple[int, ...], num_bytes: float) -> None:
        """Add collectives that travel in buckets.

        Args:
            when: BESIDE or AFTER.
            kind: one of `PACKED_KINDS`.
            axes: the mesh axes that they go over.
        """
        row = self._rows(when)[PACKED_KINDS.index(kind)]
        row[sum(1 << axis for axis in axes)] += num_bytes

    def packed(self, when: When) -> list[PackedCollectives]:
        """List what was added by `pack`, by kind and group."""
        rows = self._rows(when)
        return [
            PackedCollectives(PACKED_KINDS[kind], _axes(mask), float(rows[kind, mask]))
            for kind, mask in zip(*(found.tolist() for found in rows.nonzero()), strict=True)
        ]

    def _rows(self, when: When) -> np.ndarray:
        packed = self.vector[self._PACKED].reshape(len(_WHENS), len(PACKED_KINDS), -1)
        rows: np.ndarray = packed[_WHENS.index(when)]
        return rows

    # --- sums --------------------------------------------------------------------------

    @classmethod
    def _of(cls, vector: np.ndarray, together: PackingSets) -> Terms:
        terms = cls.__new__(cls)
        terms.vector, terms.together = vector, together
        return terms

    def __iadd__(self, other: Terms) -> Terms:
        self.vector += other.vector
        if other.together:
            self.together = self.together.plus(other.together)
        return self

    def __isub__(self, other: Terms) -> Terms:
        self.vector -= other.vector
        if other.together:
            self.together = self.together.plus(other.together, -1)
        return self

    def __add__(self, other: Terms) -> Terms:
        found = self.copy()
        found += other
        return found

    def __sub__(self, other: Terms) -> Terms:
        found = self.copy()
        found -= other
        return found

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Terms)
            and np.array_equal(self.vector, other.vector)
            and self.together == other.together
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        seconds = ("compute", "communication", "dispatch", "prefetched")
        found = [f"{name}={getattr(self, name)}" for name in seconds]
        found += [f"{name}={getattr(self, name):g}" for name in ("count", "activation_bytes")]
        found += [f"{name}={getattr(self, name):g}" for name in ("weight_bytes", "state_bytes")]
        found += [f"{when.name.lower()}={self.packed(when)}" for when in _WHENS]
        found.append(f"together={dict(self.together)}")
        return f"Terms({', '.join(found)})"

    def copy(self) -> Terms:
        """Copy the terms, to be added to."""
        return self._of(self.vector.copy(), self.together)

    def without_rounding(self) -> Terms:
        """Replace by 0 what adding and subtracting others left, which may be below 0."""
        seconds = self.vector[self._SECONDS]
        found = self._of(np.maximum(self.vector, 0.0), self.together)
        found.vector[self._SECONDS][seconds < 1e-12 * seconds.sum()] = 0.0
        packed = found.vector[self._PACKED]
        packed[packed < 0.5] = 0.0  # less than a byte
        return found


def _axes(mask: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(mask.bit_length()) if mask >> axis & 1)


# --- buckets --------------------------------------------------------------------------------
# The backward pass hides packed collectives in part (TAP §IV-G). Larger buckets start fewer
# collectives, but the first of them is full later and the last ends later: the backward pass hides
# less.

BUCKET_SIZES = tuple(2**k * 1024 * 1024 for k in range(9))
"""Sizes of packed gradient buckets to choose from, in bytes (1 to 256 MiB)."""


class Buckets(NamedTuple):
    """Times of packed collectives, and the size and number of their buckets.

    Attributes:
        seconds: of those beside the backward pass; of these `exposed_s` are not hidden.
        after_s: of those of the update.
        bucket_bytes: the size of a bucket.
        num_buckets: of all of them.
    """

    seconds: float
    exposed_s: float
    after_s: float
    bucket_bytes: int
    num_buckets: int


def best_buckets(terms: Terms, hideable_s: float, mesh: Mesh, cluster: Cluster) -> Buckets:
    """Choose the size of buckets with the least waiting, and price packed collectives in them.

    It is the one of `BUCKET_SIZES` with the least that is waited for, in the update too.

    Args:
        hideable_s: seconds of them that the backward pass can hide.
    """
    beside, after = terms.packed(When.BESIDE), terms.packed(When.AFTER)
    total = sum(packed.num_bytes for packed in beside)
    largest = max([total, *(packed.num_bytes for packed in after)])
    if not largest:
        return Buckets(0.0, 0.0, 0.0, BUCKET_SIZES[-1], 0)
    best, least = None, math.inf
    for size in BUCKET_SIZES:
        taken = [in_buckets_of(size, packed, mesh, cluster) for packed in beside]
        busy, last = sum(t[0] for t in taken), max([t[1] for t in taken], default=0.0)
        part = 1.0 - min(size / total, 1.0) if total else 0.0
        exposed = busy - min(hideable_s * part, busy - last)
        waiting = sum(in_buckets_of(size, packed, mesh, cluster)[0] for packed in after)
        if best is None or (exposed + waiting, busy) < (least, best.seconds):
            count = sum(math.ceil(packed.num_bytes / size) for packed in (*beside, *after))
            best, least = Buckets(busy, exposed, waiting, size, count), exposed + waiting
        if size >= largest:
            break
    assert best is not None
    return best


def in_buckets_of(
    bucket: float, packed: PackedCollectives, mesh: Mesh, cluster: Cluster
) -> tuple[float, float]:
    """Price packed collectives in buckets of `bucket` bytes: (seconds, seconds of the largest)."""
    kind, axes, num_bytes = packed
    full, rest = divmod(num_bytes, bucket)
    one = collective_seconds(kind, axes, bucket, mesh, cluster)
    other = collective_seconds(kind, axes, rest, mesh, cluster) if rest else 0.0
    return full * one + other, one if full else other
