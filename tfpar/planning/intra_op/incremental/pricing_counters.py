"""Counters of a search's work: they are the same on every machine, as seconds are not."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class PricingCounters:
    """Counters of the work of pricing plans so far.

    Attributes:
        looked_up: segments whose outcome was asked for, as something that they read had changed.
        segments_run: those that were propagated, in surroundings that they had not met.
        ops_visited: the ops of these.
    """

    looked_up: int = 0
    segments_run: int = 0
    ops_visited: int = 0
