"""`Findings`: knowledge of a plan, none of which changes how it runs."""

from __future__ import annotations

import dataclasses

from tfpar.cost.cost import Cost
from tfpar.plans.candidates import Candidate


@dataclasses.dataclass(frozen=True)
class Findings:
    """Knowledge of a plan that a search has found, and of others beside it.

    Attributes:
        cost: what a step costs on the plan's cluster; None where nothing was priced.
        layouts: the best plan on each other logical mesh that the planner searched, best first.
        baselines: the step on one device, and in data parallelism.
        rivals: what else `pipeline="auto"` found or passed over, the fastest first.
        trials: the plans that were run before one was taken, this one first.
        attempts: what was tried to make it fit into memory, in order, by the name of the move.
        passed_over: (seconds, collectives) of the fastest plan that was found, where a simpler one
            was taken that predictions cannot tell from it (`planning.intra_op.tie_breaking`).
        cut_short: the search, or an integer program of it, ended because its time was over, or the
            search was interrupted: there may be better plans.
    """

    cost: Cost | None = None
    layouts: tuple[Candidate, ...] = ()
    baselines: tuple[Candidate, ...] = ()
    rivals: tuple[Candidate, ...] = ()
    trials: tuple[Candidate, ...] = ()
    attempts: tuple[Candidate, ...] = ()
    passed_over: tuple[float, int] | None = None
    cut_short: bool = False
