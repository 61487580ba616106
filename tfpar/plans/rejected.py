"""`RejectedCandidate`: a way to run a step that a search has passed over."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tfpar.cost.cost import Cost

if TYPE_CHECKING:
    from tfpar.plans.plan import Plan


@dataclasses.dataclass(frozen=True)
class RejectedCandidate:
    """A pipeline, or none, that was not taken.

    Attributes:
        name: what it is: stages, microbatches, schedule, mesh of a stage.
        cost: what a step costs so, where that was priced.
        reason: why it was not priced.
        links: how many times as fast links would have to be for it to be taken instead; below 1,
            slower. None where that is not known, or no links are enough.
        plan: that it would be, where it was found now; not saved.
    """

    name: str
    cost: Cost | None = None
    reason: str = ""
    links: float | None = None
    plan: Plan | None = dataclasses.field(default=None, compare=False, repr=False)
