"""Bucket size and time of packed collectives: the backward pass hides them in part (TAP §IV-G).

Larger buckets start fewer collectives, but the first of them is full later and the last ends
later: the backward pass hides less.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import collective_seconds
from tfpar.cost.terms import PackedCollectives, Terms
from tfpar.ir.roles import When
from tfpar.spec import Mesh

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
