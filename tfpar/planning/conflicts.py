"""Diagnosis of conflicting constraints: a smallest set that leaves no plan, and the gain of
omitting each one of it.

A smallest conflicting set is found by the deletion filter: a constraint without which there is
still no plan is not needed for the conflict, and stays out. For each of what is left, the best plan
that satisfies all constraints but that one is then searched. Any planner will do: it is asked for
plans of the same step under fewer constraints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping

from tfpar.planning.deadline import Deadline
from tfpar.planning.problem import Problem
from tfpar.plans import Plan
from tfpar.spec import MemoryLimitError, Mesh, PlanError, SpecError, TimeLimitError
from tfpar.spec.quantities import format_bytes, format_seconds

CONFLICT_SECONDS = 60.0
"""Time limit for finding a conflict, in seconds, where none is set for searches."""

Relaxed = Callable[[Collection[str]], Problem]
"""The same step under only those constraints that read so."""


@dataclasses.dataclass(frozen=True, eq=False)
class Conflict:
    """Constraints that no plan satisfies together, as text.

    Attributes:
        constraints: no plan satisfies them; without any one of them there is one, if
            `is_irreducible` (else there was no time to leave out all that do not matter).
        ways: by the constraints that are left out, the best plan that satisfies all others that the
            user gave, the fastest first: each of `constraints` that is enough alone or, where none
            is, several together.
        mesh: what the constraints are for; without them a plan may be on another.
    """

    constraints: tuple[str, ...]
    is_irreducible: bool
    ways: Mapping[tuple[str, ...], Plan]
    mesh: Mesh

    def __str__(self) -> str:
        together = "this constraint" if len(self.constraints) == 1 else "these constraints together"
        parts = [f"{together}: {'; '.join(self.constraints)}."]
        if not self.is_irreducible:
            parts.append("There was no time to find out whether all of them matter.")
        if any(len(left) > 1 for left in self.ways):
            parts.append("No single one was found that is enough to leave out.")
        (first, plan), *others = self.ways.items()
        text = f"Leave out {'; '.join(first)}: the best plan then {self._figures(plan)}"
        text += " (the cheapest)" if others else ""
        for left, plan in others:
            text += f"; without {'; '.join(left)} it {self._figures(plan)}"
        return " ".join([*parts, f"{text}."])

    def _figures(self, plan: Plan) -> str:
        """Format the memory of a device and the time of a step, as the rest of a sentence."""
        text = "is one that fits"
        if plan.cost is not None:
            stored = format_bytes(plan.cost.memory_bytes)
            text = f"stores {stored} and takes {format_seconds(plan.cost.seconds)} a step"
        return text if plan.mesh == self.mesh else f"{text}, on {plan.mesh}"


def find_conflict(
    problem: Problem,
    relaxed: Relaxed,
    solve: Callable[[Problem], Plan],
) -> Conflict | None:
    """Find the constraints to blame for there being no plan for `problem`; None if they are not.

    Of n constraints it makes 2n + 1 searches at most, or 3n + 1 if several have to be left out.
    None begins once the problem's budget is over, or `CONFLICT_SECONDS` where it has no end; one
    that has begun is ended.

    Args:
        solve: the best plan for a problem, fitting or not; raises PlanError if there is none.
    """
    if not problem.given.constraints:
        return None
    asked = tuple(dict.fromkeys(problem.given.constraints))
    trials = _Trials(
        problem, relaxed, solve, Deadline(problem.aim.budget.seconds or CONFLICT_SECONDS)
    )
    free = trials.plan(())
    if free is None:
        return None
    needed, is_smallest = asked, True
    ways: dict[tuple[str, ...], Plan] = {}
    for constraint in asked:
        plan, fewer = trials.plan(_but(constraint, asked)), _but(constraint, needed)
        if plan is not None:  # and so there is one under fewer, even if a planner misses it
            ways[(constraint,)] = plan
        elif trials.plan(fewer) is None:
            if trials.is_unsure_of(fewer):
                is_smallest = False
            else:
                needed = fewer
    ways = ways or _several(trials, asked, needed, free)
    fastest = sorted(ways.items(), key=lambda way: _seconds(way[1]))
    return Conflict(needed, is_smallest, dict(fastest), problem.meshes[0].mesh)


def _several(
    trials: _Trials, asked: tuple[str, ...], needed: tuple[str, ...], free: Plan
) -> dict[tuple[str, ...], Plan]:
    """Constraints that are enough to leave out, and the best plan then.

    Each that still has a plan beside those before it is kept, first of all what is not `needed` for
    the conflict. `free` is the plan without any.
    """
    kept, best = set[str](), free
    for constraint in sorted(asked, key=needed.__contains__):
        plan = trials.plan(kept | {constraint})
        if plan is not None:
            kept, best = kept | {constraint}, plan
    return {tuple(c for c in asked if c not in kept): best}


def conflict_error(conflict: Conflict, error: PlanError, problem: Problem) -> PlanError:
    """Convert `error`, which a search for `problem` ended with, to one that names the
    constraints."""
    if isinstance(error, MemoryLimitError):
        limit = format_bytes(problem.memory_limit)
        return MemoryLimitError(f"No plan fits into {limit} under {conflict}", error.needed_bytes)
    return PlanError(f"No plan satisfies {conflict} The planner says: {error}")


class _Trials:
    """Searches under some of the constraints, each made once, and none begun after `deadline`."""

    def __init__(
        self,
        problem: Problem,
        relaxed: Relaxed,
        solve: Callable[[Problem], Plan],
        deadline: Deadline,
    ) -> None:
        self.relaxed, self.solve, self.deadline = relaxed, solve, deadline
        self.progress = problem.aim.progress
        self.found: dict[frozenset[str], Plan | None] = {}
        self.unsure: set[frozenset[str]] = set()

    def is_unsure_of(self, kept: Collection[str]) -> bool:
        """Whether time was over before a plan under these constraints was found."""
        return frozenset(kept) in self.unsure

    def plan(self, kept: Collection[str]) -> Plan | None:
        """The best plan under these constraints; None if none fits, or none was found in time."""
        key = frozenset(kept)
        if key not in self.found:
            self.found[key] = self._search(key)
        return self.found[key]

    def _search(self, kept: frozenset[str]) -> Plan | None:
        if self.found and self.deadline.over():
            self.unsure.add(kept)
            return None
        try:
            problem = self._told(self.relaxed(kept))
            plan = self.solve(problem)
        except TimeLimitError:
            self.unsure.add(kept)
            return None
        except (PlanError, SpecError):  # patterns may contradict where no exact path wins any more
            return None
        if not problem.excess(plan.cost):
            return plan
        if plan.findings.cut_short:
            self.unsure.add(kept)
        return None

    def _told(self, problem: Problem) -> Problem:
        """`problem` with a progress that says what its search is for."""
        tell = self.progress
        if tell is None:
            return problem
        purpose = f"which constraints conflict, search {len(self.found) + 1}"
        tell(purpose, 0)
        return problem.with_aim(progress=lambda what, priced: tell(f"{purpose}, {what}", priced))


def _but(one: str, constraints: Collection[str]) -> tuple[str, ...]:
    return tuple(c for c in constraints if c != one)


def _seconds(plan: Plan) -> float:
    return plan.cost.seconds if plan.cost is not None else math.inf
