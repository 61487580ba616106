"""The memory loop: named moves, from cheap to dear, until a plan fits.

A plan that does not fit is changed by moves: its optimizer slots are sharded, or offloaded; other
blocks are recomputed; another layout is searched, or another cut. Each move is tried from what was
tried before it, and every try is logged. The loop ends once a plan fits that predictions cannot
tell from the fastest plan of all, and after the last move: the fastest plan that fits is taken, or
that of which least is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from tfpar.planning.objective import UNCERTAINTY
from tfpar.plans import Candidate, Plan


class MemoryMove(Protocol):
    """A way to store less.

    Attributes:
        name: what the log calls it.
    """

    @property
    def name(self) -> str: ...

    def plans(self, fit: MemoryFit) -> Iterator[Plan]:
        """Plans changed so, priced, from those that the loop has tried; none where it is no help.

        Raises:
            PlanError: no plan satisfies the constraints.
        """
        ...


class MemoryFit:
    """The loop over moves, and what it has tried.

    Args:
        excess: of a priced plan, the bytes that a rank stores beyond what it may.
        attempts: the log to go on with.

    Attributes:
        tried: plans, in order; the first of all as it would be without limits.
    """

    def __init__(
        self, excess: Callable[[Plan], float], attempts: list[Candidate] | None = None
    ) -> None:
        self.excess = excess
        self.tried: list[Plan] = []
        self._attempts = [] if attempts is None else attempts

    def run(self, start: Plan | None, moves: Iterable[MemoryMove]) -> Plan:
        """Return the best plan that `moves` make of `start`, with the log of what was tried.

        Args:
            start: a priced plan, the fastest of all; None: each move finds plans of its own.
            moves: in the order in which they are tried.

        Raises:
            PlanError: as of the moves.
        """
        best = self._best_of(start, moves)
        cut_short = any(plan.findings.cut_short for plan in self.tried)
        return best.with_findings(cut_short=cut_short, attempts=tuple(self._attempts))

    def refine(self, plan: Plan, moves: Iterable[MemoryMove]) -> Plan:
        """Return the best plan that `moves` make of a priced one, on their own; the log goes on."""
        return MemoryFit(self.excess, self._attempts)._best_of(plan, moves)

    def _best_of(self, start: Plan | None, moves: Iterable[MemoryMove]) -> Plan:
        if start is not None:
            self._add(start)
        for move in moves:
            if self.is_settled():
                break
            for plan in move.plans(self):
                self._add(plan, move.name)
        return self.best()

    def fits(self, plan: Plan) -> bool:
        """Whether a priced plan does."""
        return not self.excess(plan)

    def best(self) -> Plan:
        """Return the fastest of the plans that fit, or that of which least is missing."""
        return min(self.tried, key=lambda plan: (self.excess(plan), seconds_or_zero(plan)))

    def is_settled(self) -> bool:
        """Whether a plan fits that predictions cannot tell from the fastest of all."""
        return bool(self.tried) and any(
            self.fits(plan) and is_near(plan, self.tried[0]) for plan in self.tried
        )

    def _add(self, plan: Plan, move: str = "") -> None:
        """Add a plan to what was tried, and to the log what was tried on the way to it."""
        self._attempts += plan.findings.attempts
        cost = plan.cost
        if move and cost is not None:
            fits = self.fits(plan)
            self._attempts.append(Candidate(move, cost.seconds, cost.memory_bytes, fits=fits))
        self.tried.append(plan.with_findings(attempts=()))


def is_near(plan: Plan, other: Plan) -> bool:
    """Whether predictions cannot tell that a plan is slower than another; true without prices."""
    if plan.cost is None or other.cost is None:
        return True
    return plan.cost.seconds <= other.cost.seconds * (1 + UNCERTAINTY)


def seconds_or_zero(plan: Plan) -> float:
    return plan.cost.seconds if plan.cost is not None else 0.0
