"""Memory move that searches the layout again for less memory, for steps in microbatches or stages.

Planners price a step in one piece on the ranks of one stage. What it stores in microbatches, or a
rank of some stage stores, is known once it is priced so; where that is too much, the layout is
searched again with proportionally less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from tfpar.planning.memory.fit import MemoryFit, MoveEstimate
from tfpar.plans import Plan
from tfpar.spec import MemoryLimitError

ATTEMPTS = 3
"""Number of memory limits that are searched with."""


class LimitedLayout(NamedTuple):
    """A layout that was searched with a limit, as it runs.

    Attributes:
        plan: as it runs, priced so; without a price if it has none.
        expected_bytes: that the search took it to store.
    """

    plan: Plan
    expected_bytes: float


class LayoutSource(Protocol):
    """Finds layouts for a limit of memory."""

    @property
    def limit(self) -> float:
        """The bytes that a search may take a plan to store."""
        ...

    def find(self, limit: float) -> LimitedLayout:
        """Find a layout for a limit.

        Raises:
            MemoryLimitError: there is none.
        """
        ...

    def room(self, plan: Plan) -> float:
        """Return the limit over what a plan stores as it runs, of the rank where that is least."""
        ...

    def lighter(self, plan: Plan, fit: MemoryFit) -> Plan:
        """Apply the other moves to a plan as it runs."""
        ...


@dataclasses.dataclass(frozen=True)
class LowerLimit:
    """Layouts for ever less memory, until one fits as it runs.

    Attributes:
        source: finds them.
        first: the layout for all memory.
    """

    source: LayoutSource
    first: LimitedLayout
    name: str = "another layout"

    def estimate(self, fit: MemoryFit) -> MoveEstimate:
        """Put the move last: the others are tried on each layout that is searched, and so on the
        first layout before."""
        return MoveEstimate(math.inf)

    def plans(self, fit: MemoryFit) -> Iterator[Plan]:
        layout, limit = self.first, self.source.limit
        for _ in range(ATTEMPTS - 1):
            if fit.fits(layout.plan) or fit.is_settled():
                return
            limit = min(limit, layout.expected_bytes) * self.source.room(layout.plan)
            try:
                layout = self.source.find(limit)
            except MemoryLimitError:
                return
            yield self.source.lighter(layout.plan, fit)
