"""What chunks of the batch hide, and what they cost (ATP §4.1)."""

from __future__ import annotations


def chunked_seconds(
    compute_s: float, waiting_s: float, startup_s: float, chunks: int, overlap: float
) -> float:
    """Seconds of a phase that is computed in chunks, one behind the other.

    While a chunk is computed, the collectives of the one before it are in flight: of `chunks`
    equal parts all but one can hide. In exchange every collective starts once for each chunk.

    Args:
        compute_s: of the ops, in one chunk.
        waiting_s: of the collectives between them that are waited for, in one chunk.
        startup_s: the part of `waiting_s` that does not shrink with what is sent.
        overlap: the part of the compute behind which collectives can hide (`Cluster.overlap`).
    """
    waiting = waiting_s + (chunks - 1) * startup_s
    hidden = (chunks - 1) / chunks * min(compute_s * overlap, waiting)
    return compute_s + waiting - hidden
