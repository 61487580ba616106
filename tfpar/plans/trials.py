"""`TrialResult`: a plan that was run for some steps before the choice was made."""

from __future__ import annotations

import dataclasses

from tfpar.spec.quantities import Amount


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """Result of a measured trial of a plan, beside its prediction; times in seconds.

    Attributes:
        name: what the plan is: stages, microbatches, schedule, mesh.
        predicted_s: of a step; None where it was not priced.
        measured_s: of a step: the median of the steps that were run, of the slowest rank; None if
            it could not be run.
        reason: why it could not.
    """

    name: str
    predicted_s: Amount | None
    measured_s: Amount | None = None
    reason: str = ""
