"""Solver of integer linear programs, with its time limits."""

from __future__ import annotations

import dataclasses
import enum
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pulp

from tfpar.planning.deadline import Deadline
from tfpar.planning.quiet_highs import hush_highs

PROGRAM_SECONDS = 20.0
"""Time limit of one program, in seconds, however long the search may take."""

MIN_PROGRAM_SECONDS = 1e-3
"""Time, in seconds, for a program that is stated when the time is over: HiGHS takes a negative
limit for none."""

RELATIVE_GAP = 1e-5
"""The relative gap at which a solution counts as optimal: to close the rest of it took programs of
small models on slow links seconds more, for the same plans."""

RELAXED_PART = 0.5
"""The part of a program's time that its relaxation may take."""

WHOLE = 1e-6
"""Tolerance within which a value counts as an integer."""


class SolveStatus(enum.Enum):
    """Outcome of solving a program."""

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
class SolverResult:
    """Result of solving a program.

    Attributes:
        x: the values, if there are any.
        gap: how far their cost is above the least, at most, relative to it.
        bound: what the relaxation of another program says of its least cost, if this one stands
            in for that.
    """

    outcome: SolveStatus
    x: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    gap: float = 0.0
    bound: float | None = None


def minimise(program: LinearProgram, deadline: Deadline) -> SolverResult:
    """Solve `program`, by HiGHS or CBC (`solver`)."""
    chosen = solver(deadline)
    if chosen.name != "HiGHS":
        return _by_pulp(program, chosen)
    highs = _Highs(program, chosen)
    return highs.relaxed() or highs.solved()


def minimise_or(
    program: LinearProgram,
    others: Callable[[np.ndarray], Iterable[np.ndarray]],
    deadline: Deadline,
) -> list[SolverResult]:
    """Solve `program` if its relaxation is integer, or other solvers than HiGHS are to; else, in
    its place, the programs with other costs.

    Args:
        others: their costs, by the duals of the relaxation: how much the least cost grows with
            the bounds of each row.
    """
    chosen = solver(deadline)
    if chosen.name != "HiGHS":
        return [_by_pulp(program, chosen)]
    highs = _Highs(program, chosen)
    answer = highs.relaxed()
    if answer is not None:
        return [answer]
    if highs.duals is None:
        return [highs.solved()]
    found, bound = [], float(highs.highs.getInfo().objective_function_value)
    for cost in others(highs.duals):  # each from where the one before ended
        highs.change(cost)
        found.append(dataclasses.replace(highs.relaxed() or highs.solved(), bound=bound))
    return found


def relaxed_cost(program: LinearProgram, deadline: Deadline) -> float:
    """Find the least cost where no x has to be an integer; 0 if that was not found in time, or
    other solvers than HiGHS are to."""
    chosen = solver(deadline)
    return _Highs(program, chosen).relaxed_cost() if chosen.name == "HiGHS" else 0.0


class _Highs:
    """A program in HiGHS itself: to hand it over entry by entry takes longer than to solve it.

    Attributes:
        duals: of the relaxation, if it was solved.
    """

    def __init__(self, program: LinearProgram, configured: Any) -> None:
        holder = types.SimpleNamespace()
        configured.createAndConfigureSolver(holder)
        self.highs, self.program = holder.solverModel, program
        self.end = time.monotonic() + configured.timeLimit
        self.duals: np.ndarray | None = None
        count, rows = len(program.cost), np.arange(len(program.least))
        self.highs.passModel(
            count,
            len(rows),
            len(program.values),
            2,  # row by row
            1,  # the least is sought
            0.0,
            program.cost,
            np.zeros(count),
            program.upper,
            program.least,
            program.most,
            np.searchsorted(program.rows, rows).astype(np.int32),
            program.columns.astype(np.int32),
            program.values,
            program.integer.astype(np.int32),
        )

    def change(self, cost: np.ndarray) -> None:
        """Another cost; the solver goes on from where it is."""
        self.highs.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)

    def relaxed(self) -> SolverResult | None:
        """Solve the relaxation, and return its solution if that is an answer: it nearly always is
        integer, and needs less preparation."""
        from highspy import HighsModelStatus

        status = self._run(True, RELAXED_PART)
        if status in self._impossible():
            return SolverResult(SolveStatus.INFEASIBLE)
        if status != HighsModelStatus.kOptimal:
            return None
        solution = self.highs.getSolution()
        x = np.array(solution.col_value)
        whole = x[self.program.integer]
        if np.all(np.abs(whole - np.round(whole)) <= WHOLE):
            return SolverResult(SolveStatus.SOLVED, x)
        self.duals = np.array(solution.row_dual)
        return None

    def relaxed_cost(self) -> float:
        """The cost of the relaxation; 0 if it was not solved."""
        from highspy import HighsModelStatus

        optimal = self._run(True, 1.0) == HighsModelStatus.kOptimal
        return float(self.highs.getInfo().objective_function_value) if optimal else 0.0

    def solved(self) -> SolverResult:
        """The answer."""
        if self._run(False, 1.0) in self._impossible():
            return SolverResult(SolveStatus.INFEASIBLE)
        gap = self.highs.getInfo().mip_gap
        if not np.isfinite(gap):
            return SolverResult(SolveStatus.NONE_IN_TIME)
        return SolverResult(
            SolveStatus.SOLVED, np.array(self.highs.getSolution().col_value), max(0.0, gap)
        )

    def _run(self, relaxed: bool, part: float) -> Any:
        """Run the solver within this part of the time that is left, and return its status."""
        left = max(part * (self.end - time.monotonic()), MIN_PROGRAM_SECONDS)
        self.highs.setOptionValue("solve_relaxation", relaxed)
        self.highs.setOptionValue("time_limit", left)
        self.highs.run()
        return self.highs.getModelStatus()

    @staticmethod
    def _impossible() -> tuple[Any, ...]:
        from highspy import HighsModelStatus

        return HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible


def _by_pulp(program: LinearProgram, chosen: pulp.LpSolver) -> SolverResult:
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
        return SolverResult(SolveStatus.INFEASIBLE)
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return SolverResult(SolveStatus.NONE_IN_TIME)
    values = np.array([v.value() or 0.0 for v in x])
    return SolverResult(SolveStatus.SOLVED, values, gap_of(problem))


def solver(deadline: Deadline, time_limit_s: float = PROGRAM_SECONDS) -> pulp.LpSolver:
    """HiGHS, which looks now and then whether the search was given up, or CBC where it is not
    installed; with the time that is left, `time_limit_s` at most."""
    seconds = min(max(deadline.left, MIN_PROGRAM_SECONDS), time_limit_s)
    options = {"msg": False, "timeLimit": seconds, "gapRel": RELATIVE_GAP, "threads": 1}
    highs = pulp.getSolver("HiGHS", **options)
    if highs.available():
        import highspy  # of which there is no need where CBC is

        hush_highs()

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
    """Return the relative gap that the solver left; HiGHS knows it, CBC is taken at its word."""
    model: Any = getattr(problem, "solverModel", None)
    if hasattr(model, "getInfo") and np.isfinite(model.getInfo().mip_gap):
        return float(max(0.0, model.getInfo().mip_gap))
    return 0.0 if problem.sol_status == pulp.LpSolutionOptimal else float("inf")
