"""What solves integer linear programs here, and for how long."""

from __future__ import annotations

import dataclasses
import enum
import time
import types
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

RELAXED_PART = 0.5
"""The part of a program's time that its relaxation may take."""

WHOLE = 1e-6
"""How far from an integer a value is that counts as one."""


class Outcome(enum.Enum):
    """How a program ended."""

    SOLVED = "the values are a solution, the best or the best that was found in time"
    INFEASIBLE = "there is no solution"
    NONE_IN_TIME = "none was found in time"


@dataclasses.dataclass(frozen=True, eq=False)
class LinearProgram:
    """Find x with the least `cost @ x` where 0 <= x <= upper and least <= A x <= most.

    Attributes:
        integer: which x have to be integers.
        rows, columns, values: the entries of A that are not 0, each place once, row by row.
    """

    cost: np.ndarray
    upper: np.ndarray
    integer: np.ndarray
    least: np.ndarray
    most: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """What came of a program.

    Attributes:
        x: the values, if it was solved.
        gap: how far their cost is above the least, at most, relative to it.
    """

    outcome: Outcome
    x: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    gap: float = 0.0


def minimise(program: LinearProgram, deadline: Deadline) -> Answer:
    """Solve `program`, by HiGHS or CBC (`solver`)."""
    chosen = solver(deadline)
    if chosen.name == "HiGHS":
        return _by_highs(program, chosen)
    return _by_pulp(program, chosen)


def _by_highs(program: LinearProgram, configured: Any) -> Answer:
    """By HiGHS itself: to hand it a program entry by entry takes longer than to solve it."""
    from highspy import HighsModelStatus as Status

    impossible = Status.kInfeasible, Status.kUnboundedOrInfeasible
    holder = types.SimpleNamespace()
    configured.createAndConfigureSolver(holder)
    highs = holder.solverModel
    starts = np.searchsorted(program.rows, np.arange(len(program.least)))
    highs.passModel(
        len(program.cost),
        len(program.least),
        len(program.values),
        2,  # row by row
        1,  # the least is sought
        0.0,
        program.cost,
        np.zeros(len(program.cost)),
        program.upper,
        program.least,
        program.most,
        starts.astype(np.int32),
        program.columns.astype(np.int32),
        program.values,
        program.integer.astype(np.int32),
    )
    # The relaxation nearly always is integer, and needs less preparation.
    end = time.monotonic() + configured.timeLimit
    highs.setOptionValue("solve_relaxation", True)
    highs.setOptionValue("time_limit", RELAXED_PART * configured.timeLimit)
    highs.run()
    x = np.array(highs.getSolution().col_value)
    if highs.getModelStatus() == Status.kOptimal and _is_whole(x[program.integer]):
        return Answer(Outcome.SOLVED, x)
    if highs.getModelStatus() in impossible:
        return Answer(Outcome.INFEASIBLE)
    highs.setOptionValue("solve_relaxation", False)
    highs.setOptionValue("time_limit", max(end - time.monotonic(), MIN_PROGRAM_SECONDS))
    highs.run()
    if highs.getModelStatus() in impossible:
        return Answer(Outcome.INFEASIBLE)
    gap = highs.getInfo().mip_gap
    if not np.isfinite(gap):
        return Answer(Outcome.NONE_IN_TIME)
    return Answer(Outcome.SOLVED, np.array(highs.getSolution().col_value), max(0.0, gap))


def _is_whole(x: np.ndarray) -> bool:
    return bool(np.all(np.abs(x - np.round(x)) <= WHOLE))


def _by_pulp(program: LinearProgram, chosen: pulp.LpSolver) -> Answer:
    problem = pulp.LpProblem("program", pulp.LpMinimize)
    x = [
        problem.add_variable(
            f"x_{i}",
            0,
            upper if np.isfinite(upper) else None,
            pulp.LpInteger if whole else "Continuous",
        )
        for i, (upper, whole) in enumerate(zip(program.upper, program.integer, strict=True))
    ]
    problem.setObjective(pulp.LpAffineExpression(dict(zip(x, program.cost, strict=True))))
    ends = np.searchsorted(program.rows, np.arange(1, len(program.least)))
    for columns, values, least, most in zip(
        np.split(program.columns, ends),
        np.split(program.values, ends),
        program.least,
        program.most,
        strict=True,
    ):
        terms = pulp.LpAffineExpression(
            {x[c]: float(v) for c, v in zip(columns, values, strict=True)}
        )
        if least == most:
            problem.addConstraint(pulp.LpConstraint(terms, pulp.LpConstraintEQ, None, least))
        else:
            problem.addConstraint(pulp.LpConstraint(terms, pulp.LpConstraintGE, None, least))
    problem.solve(chosen)
    if problem.status == pulp.LpStatusInfeasible:
        return Answer(Outcome.INFEASIBLE)
    values = np.array([v.value() or 0.0 for v in x])
    return Answer(Outcome.SOLVED, values, gap_of(problem))


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
        interrupts = highspy.cb.HighsCallbackType
        highs.callbacksToActivate = [
            interrupts.kCallbackMipInterrupt,
            interrupts.kCallbackSimplexInterrupt,
        ]
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
