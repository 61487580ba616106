"""Which constraints leave no plan, and what leaving out one of them is worth.

A smallest set that conflicts is found by the deletion filter: a constraint without which there is
still no plan is not needed for the conflict, and stays out. For each of what is left, the best plan
that satisfies all constraints but that one is then searched. Any planner will do: it is asked for
plans of the same step under fewer constraints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping

from tfpar.plans import Plan
from tfpar.report.tables import format_bytes, format_seconds
from tfpar.search.deadline import Deadline
from tfpar.search.problem import Problem
from tfpar.spec import MemoryLimitError, Mesh, PlanError, SpecError, TimeLimitError

PATIENCE_S = 60.0
"""What finding a conflict may take, in seconds, where no time is set for searches."""

Relaxed = Callable[[Collection[str]], Problem]
"""The same step under only those constraints that read so."""


@dataclasses.dataclass(frozen=True, eq=False)
class Conflict:
    """Constraints that no plan satisfies together, as text.

    Attributes:
        constraints: no plan satisfies them; without any one of them there is one, if `is_smallest`
            (else there was no time to leave out all that do not matter).
        without: by constraint, the best plan that satisfies all others that the user gave, the
            fastest first.
        not_enough: constraints that others conflict with just as well.
        free: the best plan without any constraint.
        mesh: what the constraints are for; without them a plan may be on another.
    """

    constraints: tuple[str, ...]
    is_smallest: bool
    without: Mapping[str, Plan]
    not_enough: tuple[str, ...]
    free: Plan
    mesh: Mesh

    def __str__(self) -> str:
        together = "this constraint" if len(self.constraints) == 1 else "these constraints together"
        parts = [f"{together}: {'; '.join(self.constraints)}."]
        if not self.is_smallest:
            parts.append("There was no time to find out whether all of them matter.")
        if self.without:
            first, *others = self.without.items()
            parts.append(f"Leave out {first[0]}: the best plan then {self._figures(first[1])}")
            parts[-1] += " (the cheapest)" if others else ""
            for name, plan in others:
                parts[-1] += f"; without {name} it {self._figures(plan)}"
            parts[-1] += "."
        if self.not_enough:
            which = " or ".join(self.not_enough)
            parts.append(f"To leave out only {which} is not enough: others conflict as well.")
        if not self.without:
            parts.append(f"Without any constraint the best plan {self._figures(self.free)}.")
        return " ".join(parts)

    def _figures(self, plan: Plan) -> str:
        """What a device stores and a step takes, as the rest of a sentence."""
        text = "is one that fits"
        if plan.cost is not None:
            stored = format_bytes(round(plan.cost.memory_bytes))
            text = f"stores {stored} and takes {format_seconds(plan.cost.seconds)} a step"
        return text if plan.mesh == self.mesh else f"{text}, on {plan.mesh}"


def find_conflict(
    problem: Problem, relaxed: Relaxed, solve: Callable[[Problem], Plan],
    seconds: float | None = None,
) -> Conflict | None:  # fmt: skip
    """The constraints to blame for there being no plan for `problem`; None if they are not.

    Of n constraints it makes 2n + 1 searches at most. A search that has begun is ended.

    Args:
        solve: the best plan for a problem, fitting or not; raises PlanError if there is none.
        seconds: how long to go on beginning searches; by default `PATIENCE_S`.
    """
    if not problem.constraints:
        return None
    asked = tuple(dict.fromkeys(problem.constraints))
    deadline = Deadline(seconds or PATIENCE_S)
    trials = _Trials(problem, relaxed, solve, 2 * len(asked) + 1)
    free = trials.plan(())
    if free is None:
        return None
    needed, is_smallest = asked, True
    for constraint in asked:
        fewer = _but(constraint, needed)
        if not trials.knows(fewer) and deadline.over():
            break
        if trials.plan(fewer) is None:
            if trials.is_sure_of(fewer):
                needed = fewer
            else:
                is_smallest = False
    is_smallest = is_smallest and not deadline.cut_short
    without: dict[str, Plan] = {}
    not_enough = []
    for constraint in needed:
        others = _but(constraint, asked)
        if not trials.knows(others) and deadline.over():
            continue
        plan = trials.plan(others)
        if plan is not None:
            without[constraint] = plan
        elif trials.is_sure_of(others):
            not_enough.append(constraint)
    fastest = sorted(without.items(), key=lambda item: _seconds(item[1]))
    return Conflict(
        needed, is_smallest, dict(fastest), tuple(not_enough), free, problem.layouts[0].mesh
    )


def conflict_error(conflict: Conflict, error: PlanError, problem: Problem) -> PlanError:
    """`error`, which a search for `problem` ended with, as one that names the constraints."""
    if isinstance(error, MemoryLimitError):
        limit = format_bytes(round(problem.cluster.device.memory_bytes))
        return MemoryLimitError(f"No plan fits into {limit} under {conflict}", error.needed_bytes)
    return PlanError(f"No plan satisfies {conflict} The planner says: {error}")


class _Trials:
    """Searches under some of the constraints, each made once."""

    def __init__(
        self, problem: Problem, relaxed: Relaxed, solve: Callable[[Problem], Plan], most: int
    ) -> None:
        self.relaxed, self.solve, self.most = relaxed, solve, most
        self.progress = problem.progress
        self.found: dict[frozenset[str], Plan | None] = {}
        self.unsure: set[frozenset[str]] = set()

    def knows(self, kept: Collection[str]) -> bool:
        """Whether the plan under these constraints was searched before."""
        return frozenset(kept) in self.found

    def is_sure_of(self, kept: Collection[str]) -> bool:
        """Whether the search went to its end, so that finding nothing means there is nothing."""
        return frozenset(kept) not in self.unsure

    def plan(self, kept: Collection[str]) -> Plan | None:
        """The best plan under these constraints; None if none fits."""
        key = frozenset(kept)
        if key not in self.found:
            self.found[key] = self._search(key)
        return self.found[key]

    def _search(self, kept: frozenset[str]) -> Plan | None:
        try:
            problem = self._told(self.relaxed(kept))
            plan = self.solve(problem)
        except TimeLimitError:
            self.unsure.add(kept)
            return None
        except (PlanError, SpecError):  # patterns may contradict where no exact path wins any more
            return None
        if not problem.excess(plan):
            return plan
        if plan.cut_short:
            self.unsure.add(kept)
        return None

    def _told(self, problem: Problem) -> Problem:
        """`problem` with a progress that says what its search is for."""
        tell = self.progress
        if tell is None:
            return problem
        count = len(self.found) + 1
        purpose = f"which constraints conflict (search {count} of {self.most} at most)"
        tell(purpose, 0)
        return dataclasses.replace(
            problem, progress=lambda what, priced: tell(f"{purpose}, {what}", priced)
        )


def _but(one: str, constraints: Collection[str]) -> tuple[str, ...]:
    return tuple(c for c in constraints if c != one)


def _seconds(plan: Plan) -> float:
    return plan.cost.seconds if plan.cost is not None else math.inf
