"""What solves integer linear programs here, and for how long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pulp

from tfpar.search.deadline import Deadline

PROGRAM_SECONDS = 20.0
"""What one program may take, in seconds, however long the search may."""

MIN_PROGRAM_SECONDS = 1e-3
"""What a program gets, in seconds, that is stated when the time is over: HiGHS takes a negative
limit for none."""

RELATIVE_GAP = 1e-5
"""The relative gap at which a solution counts as optimal: to close the rest of it took programs of
small models on slow links seconds more, for the same plans."""


def solver(deadline: Deadline) -> pulp.LpSolver:
    """HiGHS, which looks now and then whether the search was given up, or CBC where it is not
    installed; with the time that is left, `PROGRAM_SECONDS` at most."""
    seconds = min(max(deadline.left, MIN_PROGRAM_SECONDS), PROGRAM_SECONDS)
    options = {"msg": False, "timeLimit": seconds, "gapRel": RELATIVE_GAP, "threads": 1}
    highs = pulp.getSolver("HiGHS", **options)
    if highs.available():
        import highspy  # of which there is no need where CBC is

        def look(kind: Any, message: str, so_far: Any, told: Any, data: Any) -> None:
            told.user_interrupt = deadline.stopped

        highs.callbackTuple = (look, None)
        highs.callbacksToActivate = [highspy.cb.HighsCallbackType.kCallbackMipInterrupt]
        return highs
    cbc = pulp.getSolver("PULP_CBC_CMD", **options)
    if cbc.available():
        return cbc
    raise RuntimeError("PuLP finds neither HiGHS nor CBC; pip install highspy")


def gap_of(problem: pulp.LpProblem) -> float:
    """The relative gap that the solver left; HiGHS knows it, CBC is taken at its word."""
    model: Any = getattr(problem, "solverModel", None)
    if hasattr(model, "getInfo") and np.isfinite(model.getInfo().mip_gap):
        return float(max(0.0, model.getInfo().mip_gap))
    return 0.0 if problem.sol_status == pulp.LpSolutionOptimal else float("inf")
