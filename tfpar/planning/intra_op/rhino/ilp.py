"""The integer linear program of a cost network (Rhino §4.2).

For node i and its choice j there is a binary X_ij, one of each node (`_one_hot`):

    sum_j X_ij = 1

A tensor t is left in state p by its maker's choices that leave it so, and needed in q likewise:
P_tp and Q_trq are sums of X. The product P_tp * Q_trq of §4.2's objective is a continuous A_trpq
for each reader r with these marginals (`_products`):

    sum_q A_trpq = P_tp        sum_p A_trpq = Q_trq        A_trpq >= 0

At integer X they hold for the products and for nothing else. They imply §4.2's A >= P + Q - 1 and
are much tighter where X is not integer, so that the relaxation nearly always is. A move that cannot
be has A = 0. A tensor that several readers need in the same state is moved once (`_once`):

    B_tpq >= A_trpq            for each reader r

The objective is sum X_ij seconds_ij + sum B_tpq seconds_tpq + E, where the work E that nothing
hides is

    E >= sum X_ij late_ij + sum B_tpq late_tpq        E >= 0        (E)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from tfpar.planning.deadline import Deadline
from tfpar.planning.intra_op.rhino.cost_network import CostNetwork, ReshardCosts
from tfpar.planning.solver import (
    RELATIVE_GAP,
    LinearProgram,
    SolverResult,
    SolveStatus,
    minimise,
    minimise_or,
    relaxed_cost,
)


@dataclasses.dataclass(frozen=True)
class Solution:
    """Choices of all nodes.

    Attributes:
        gap: how far, at most, their cost is above the optimum, relative to it.
    """

    picks: tuple[int, ...]
    seconds: float
    gap: float = 0.0


class NoSolution(Exception):
    """No choices satisfy the program, or none were found in time."""

    def __init__(self, timed_out: bool) -> None:
        super().__init__("no time" if timed_out else "infeasible")
        self.timed_out = timed_out


def solve_network(network: CostNetwork, deadline: Deadline | None = None) -> Solution:
    """Find the choices that cost least; or, with their gap, the best found before `PROGRAM_SECONDS`
    or the deadline are over, which is then cut short.

    Raises:
        NoSolution: there are none, or none were found in time.
        SearchStopped: the search was given up meanwhile.
    """
    deadline = deadline or Deadline()
    program = _Program(network)
    deadline.check()
    return program.solution(minimise(program.stated(), deadline), deadline)


def solve_nearly(network: CostNetwork, deadline: Deadline | None = None) -> list[Solution]:
    """Choices that cost about the least.

    The relaxation of the program says how much of late work counts: the dual of (E). With so much
    counted work is a sum as all else is, and programs without E nearly always have integer
    relaxations. Where the relaxation of the program itself is none, it is a mixture of two of
    those: of what is best where a little less counts, and a little more. Gaps are to what the
    relaxation costs.

    Errors: as of `solve_network`.
    """
    deadline = deadline or Deadline()
    program = _Program(network)

    def beside(duals: np.ndarray) -> list[np.ndarray]:
        counted = float(duals[-1]) if program.has_late else 0.0
        return [
            program.costs(part)
            for part in sorted({max(0.0, counted - BESIDE), min(1.0, counted + BESIDE)})
        ]

    answers = minimise_or(program.stated(), beside, deadline)
    return [program.solution(answer, deadline) for answer in answers]


@dataclasses.dataclass(frozen=True, eq=False)
class FixedCharge:
    """Seconds that are spent once, however many choices spend them: for charge c a continuous Y_c,

        Y_c >= sum_j X_ij    of the choices of node i that spend it
        Y_c >= sum_pq A_trpq    of the ways of tensor t to reader r that do

    Attributes:
        by_nodes: for each node some of whose choices spend it, whether each does.
        by_moves: for each entry of the network's moves likewise, by the states left and needed.
    """

    seconds: float
    by_nodes: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    by_moves: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)


def relaxed_seconds(
    network: CostNetwork, deadline: Deadline, charges: Iterable[FixedCharge] = ()
) -> float:
    """Bound what any choices cost from below, by the relaxation of the program; 0 if it was not
    solved in time.

    Args:
        charges: what they cost beside what is in the network.

    Raises:
        NoSolution: no choices satisfy the program.
    """
    program = _Program(network, charges)
    return relaxed_cost(program.stated(), deadline) / program.scale


BESIDE = 1e-3
"""Step by which the part of late work that counts is varied, to both sides of the relaxation's."""


_Products = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of one reader of a tensor the columns of its products, the last, by the states left and
needed."""


class _Program:
    """The columns (variables) and rows (constraints) of a network's program.

    Attributes:
        chosen: for each node the columns of its choices, which are the first of all; -1 for those
            that are barred.
        has_late: some late work may be left over, so that there is a column E, the last.
    """

    def __init__(self, network: CostNetwork, charges: Iterable[FixedCharge] = ()) -> None:
        self.network = network
        self.num_columns = self.num_rows = 0
        self._costs: list[tuple[np.ndarray, np.ndarray]] = []
        self._entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._bounds: list[tuple[np.ndarray, np.ndarray]] = []
        self.chosen = [self._one_hot(i) for i in range(len(network.nodes))]
        self.num_choices = self.num_columns
        self._products = [self._moves(moves) for moves in network.moves]
        for charge in charges:
            self._charge(charge)
        self.has_late = any((late > 0).any() for _, late in self._costs)
        # Solvers' tolerances are absolute: what a step takes is to be of the order of 1000.
        least = sum(float(node.seconds.min()) for node in network.nodes)
        most = max(
            (np.abs(costs).max() for both in self._costs for costs in both if len(costs)),
            default=1.0,
        )
        self.scale = 1e3 / max(least, 1e-3 * float(most), 1e-12)

    def _add_columns(self, seconds: np.ndarray, late: np.ndarray) -> np.ndarray:
        """Variables that cost so much; returns their numbers."""
        self._costs.append((seconds, late))
        first = self.num_columns
        self.num_columns += len(seconds)
        return np.arange(first, self.num_columns)

    def _add_rows(
        self,
        count: int,
        rows: np.ndarray,
        columns: np.ndarray,
        values: np.ndarray,
        least: float,
        most: float,
    ) -> None:
        """Constraints of the same bounds; in `rows` their numbers, from 0, entry by entry."""
        order = np.argsort(rows, kind="stable")
        self._entries.append((self.num_rows + rows[order], columns[order], values[order]))
        self._bounds.append((np.full(count, least), np.full(count, most)))
        self.num_rows += count

    def _one_hot(self, i: int) -> np.ndarray:
        node = self.network.nodes[i]
        (allowed,) = np.isfinite(node.seconds).nonzero()
        if not len(allowed):
            raise NoSolution(False)
        columns = np.full(node.size, -1)
        columns[allowed] = one = self._add_columns(node.seconds[allowed], node.late[allowed])
        self._add_rows(1, np.zeros(len(one), int), one, np.ones(len(one)), 1.0, 1.0)
        return columns

    def _states(self, node: int, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The states that `node` may be in, and which of them each choice is that is allowed."""
        return np.unique(states[self.chosen[node] >= 0], return_inverse=True)

    def _moves(self, moves: ReshardCosts) -> list[_Products]:
        """The products of each reader."""
        left, made = self._states(moves.source, moves.made)
        reads = []
        wanted = np.zeros(moves.seconds.shape, int)  # by how many readers
        for node, needs in moves.readers:
            needed, wants = self._states(node, needs)
            states = np.ix_(left, needed)
            if moves.seconds[states].any() or moves.late[states].any():
                reads.append((node, needed, wants))
                wanted[states] += 1
        shared: dict[tuple[int, int], list[int]] = {}
        found = []
        for node, needed, wants in reads:
            states = np.ix_(left, needed)
            p, q = np.isfinite(moves.seconds[states]).nonzero()
            at = left[p], needed[q]
            alone = wanted[at] == 1
            products = self._add_columns(
                np.where(alone, moves.seconds[at], 0.0), np.where(alone, moves.late[at], 0.0)
            )
            self._marginals(p, products, made, moves.source)
            self._marginals(q, products, wants, node)
            found.append((*at, products))
            for p_, q_, product in zip(*at, products, strict=True):
                if wanted[p_, q_] > 1:
                    shared.setdefault((p_, q_), []).append(product)
        for state, alike in shared.items():
            if moves.seconds[state] or moves.late[state]:
                self._once(moves.seconds[state], moves.late[state], alike)
        return found

    def _charge(self, charge: FixedCharge) -> None:
        spent = self._add_columns(np.array([charge.seconds]), np.zeros(1))
        ways = [self.chosen[node][spends] for node, spends in charge.by_nodes.items()]
        ways += [
            products[spends[left, needed]]
            for moves, spends in charge.by_moves.items()
            for left, needed, products in self._products[moves]
        ]
        for some in ways:
            some = some[some >= 0]
            columns = np.append(spent, some)
            values = np.append(1.0, -np.ones(len(some)))
            self._add_rows(1, np.zeros(len(columns), int), columns, values, 0.0, np.inf)

    def _marginals(
        self, states: np.ndarray, products: np.ndarray, taken: np.ndarray, node: int
    ) -> None:
        """The products in each state come to the choices of `node` that are in it.

        Args:
            states: of the products; taken: of the choices that are allowed.
        """
        chosen = self.chosen[node]
        rows, columns = np.append(states, taken), np.append(products, chosen[chosen >= 0])
        values = np.append(np.ones(len(products)), -np.ones(len(taken)))
        self._add_rows(int(taken.max()) + 1, rows, columns, values, 0.0, 0.0)

    def _once(self, seconds: float, late: float, products: Sequence[int]) -> None:
        once = self._add_columns(np.array([seconds]), np.array([late]))
        count = len(products)
        columns = np.append(np.repeat(once, count), products)
        values = np.append(np.ones(count), -np.ones(count))
        self._add_rows(count, np.tile(np.arange(count), 2), columns, values, 0.0, np.inf)

    def stated(self) -> LinearProgram:
        """The program as it is solved."""
        cost = self.costs(0.0)
        upper, integer = np.ones(len(cost)), np.arange(len(cost)) < self.num_choices
        rows, columns, values = map(np.concatenate, zip(*self._entries, strict=True))
        least, most = map(np.concatenate, zip(*self._bounds, strict=True))
        if self.has_late:  # (E)
            cost[-1], upper[-1] = 1.0, np.inf
            late = self.costs(1.0) - self.costs(0.0)
            (at,) = late.nonzero()
            rows = np.append(rows, np.full(len(at) + 1, len(least)))
            columns = np.concatenate([columns, at, [len(cost) - 1]])
            values = np.concatenate([values, -late[at], [1.0]])
            least, most = np.append(least, 0.0), np.append(most, np.inf)
        return LinearProgram(cost, upper, integer, least, most, rows, columns, values)

    def costs(self, exposed: float) -> np.ndarray:
        """Return the costs of the columns where this part of late work counts, and E is free."""
        seconds, late = map(np.concatenate, zip(*self._costs, strict=True))
        return np.append(self.scale * (seconds + exposed * late), [0.0] * self.has_late)

    def solution(self, answer: SolverResult, deadline: Deadline) -> Solution:
        """The choices that an answer stands for; errors as of `solve_network`."""
        deadline.check()
        timed_out = answer.outcome is SolveStatus.NONE_IN_TIME
        deadline.cut_short |= timed_out or answer.gap > RELATIVE_GAP
        if answer.outcome is not SolveStatus.SOLVED:
            raise NoSolution(timed_out)
        values = (np.where(columns >= 0, answer.x[columns], -1.0) for columns in self.chosen)
        picks = tuple(int(of_node.argmax()) for of_node in values)
        seconds, gap = self.network.cost(picks), answer.gap
        if answer.bound is not None:
            gap = max(0.0, 1.0 - answer.bound / self.scale / max(seconds, 1e-300))
        return Solution(picks, seconds, gap)
