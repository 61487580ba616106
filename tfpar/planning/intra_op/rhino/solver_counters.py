"""Counters of a solver's work: they are the same on every machine, as seconds are not."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class SolverCounters:
    """Counters of the work of deciding along the axes of some meshes.

    Attributes:
        spaces: whose strategies were worked out, one for each axis and decisions before it.
        strategies: of all their nodes.
        programs: stated, relaxed ones and those that were solved each for itself.
        choices: of all nodes of these programs.
        by_segments: how often a network was decided segment by segment.
    """

    spaces: int = 0
    strategies: int = 0
    programs: int = 0
    choices: int = 0
    by_segments: int = 0

    def __add__(self, other: SolverCounters) -> SolverCounters:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return SolverCounters(*map(sum, pairs))
