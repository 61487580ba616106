"""Summaries of the candidates that a search priced beside its plan."""

from __future__ import annotations

from typing import NamedTuple

from tfpar.spec.quantities import Amount


class PricedCandidate(NamedTuple):
    """Summary of another plan that was priced.

    Attributes:
        name: the logical mesh and the axes that split the batch; or of a baseline, what it is.
        seconds: of a step.
        memory_bytes: the most that a rank stores; None where that was not looked at.
    """

    name: str
    seconds: Amount
    memory_bytes: Amount | None = None
