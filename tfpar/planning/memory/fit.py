"""The memory loop: named moves, cheapest seconds per byte first, until a plan fits.

A plan that does not fit is changed by moves: its optimizer slots are sharded, or offloaded; other
blocks are recomputed; another layout is searched, or another cut. Each move estimates what a byte
costs that it saves, which orders them, and makes plans of what was tried before it; every try is
logged. The loop ends once a plan fits that predictions cannot tell from the fastest plan of all,
and once no move is left that may make a faster one than the best that fits. The fastest plan that
fits is taken, or that of which least is missing.

Example: a block is computed again in 0.5 ns for each byte that it no longer keeps, and its
activations cross the link to the host and back in 0.2 ns a byte. So they are offloaded first. If
the plan that this makes fits and is 4 % slower than the fastest of all, nothing is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from tfpar.planning.objective import UNCERTAINTY
from tfpar.plans import Candidate, Plan


class MoveEstimate(NamedTuple):
    """Estimate of a move before it is tried, in closed form: nothing is searched or priced.

    Attributes:
        seconds_per_byte: about what it adds to a step for each byte that a rank stores less; 0
            where nothing is known, infinite for a move that is to be tried after all others.
        step_seconds: a lower bound of a step's seconds under all plans that it makes; 0 where none
            is known.
    """

    seconds_per_byte: float = 0.0
    step_seconds: float = 0.0


class MemoryMove(Protocol):
    """A way to store less.

    Attributes:
        name: what the log calls it.
    """

    @property
    def name(self) -> str: ...

    def estimate(self, fit: MemoryFit) -> MoveEstimate:
        """Estimate what the move costs; `fit` has the plan to begin with."""
        ...

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
            moves: in any order; of those that cost the same the first is tried first. Without a
                `start`, those that come before there is a plan are tried as they come.

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
        if self.is_settled():
            return self.best()
        for move, estimate in self._cheapest_first(moves):
            if estimate.step_seconds < self._fitting_seconds():
                for plan in move.plans(self):
                    self._add(plan, move.name)
            if self.is_settled():
                break
        return self.best()

    def _cheapest_first(
        self, moves: Iterable[MemoryMove]
    ) -> Iterator[tuple[MemoryMove, MoveEstimate]]:
        """The moves by their seconds per byte. Those of 0 come at once: none can be cheaper, and if
        they are enough, no others are made."""
        dearer: list[tuple[MemoryMove, MoveEstimate]] = []
        for move in moves:
            estimate = move.estimate(self) if self.tried else MoveEstimate()
            if estimate.seconds_per_byte:
                dearer.append((move, estimate))
            else:
                yield move, estimate
        yield from sorted(dearer, key=lambda one: one[1].seconds_per_byte)

    def _fitting_seconds(self) -> float:
        """Of a step, under the fastest plan that fits; infinite if none does."""
        return min(map(seconds_or_zero, filter(self.fits, self.tried)), default=math.inf)

    def fits(self, plan: Plan) -> bool:
        """Whether a priced plan does."""
        return not self.excess(plan)

    def best(self, among: Callable[[Plan], object] | None = None) -> Plan:
        """Return the fastest of the plans that fit, or that of which least is missing.

        Args:
            among: whether a plan counts; by default all do.
        """
        tried = filter(among, self.tried) if among else self.tried
        return min(tried, key=lambda plan: (self.excess(plan), seconds_or_zero(plan)))

    def misses(self) -> list[Plan]:
        """List the plans that do not fit, the one that lacks least first."""
        return sorted((plan for plan in self.tried if not self.fits(plan)), key=self.excess)

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
