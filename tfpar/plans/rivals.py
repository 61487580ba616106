"""`Rival`: a way to run a step that a search has passed over."""

from __future__ import annotations

import dataclasses

from tfpar.cost.cost import Cost


@dataclasses.dataclass(frozen=True)
class Rival:
    """A pipeline, or none, that was not taken.

    Attributes:
        name: what it is: stages, microbatches, schedule, mesh of a stage.
        cost: what a step costs so, where that was priced.
        reason: why it was not priced.
    """

    name: str
    cost: Cost | None = None
    reason: str = ""
