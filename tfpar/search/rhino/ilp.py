"""The integer linear program of a cost network (Rhino §4.2).

For node i and its choice j there is a binary X_ij, one of each node (`_one_hot`):

    sum_j X_ij = 1

A tensor t is left in state p by its maker's choices that leave it so, and needed in q likewise:
P_tp and Q_trq are sums of X. The product P_tp * Q_trq of §4.2's objective is a continuous A_trpq
for each reader r with these marginals (`_products`):

    sum_q A_trpq = P_tp        sum_p A_trpq = Q_trq        A_trpq >= 0

At integer X they hold for the products and for nothing else. They imply §4.2's
A >= P + Q - 1 and are much tighter where X is not integer, so that the relaxation nearly always is.
A move that cannot be has A = 0. What several readers need alike is moved once (`_once`):

    B_tpq >= A_trpq            for each reader r

The objective is sum X_ij seconds_ij + sum B_tpq seconds_tpq + E, where the work E that nothing
hides (`_exposed`) is

    E >= sum X_ij late_ij + sum B_tpq late_tpq        E >= 0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pulp

from tfpar.search.deadline import Deadline
from tfpar.search.rhino.network import Moves, Network
from tfpar.search.solver import RELATIVE_GAP, gap_of, solver


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


def solve_network(network: Network, deadline: Deadline | None = None) -> Solution:
    """The choices that cost least; or, with their gap, the best found before `PROGRAM_SECONDS` or
    the deadline are over, which is then cut short.

    Raises:
        NoSolution: there are none, or none were found in time.
        SearchStopped: the search was given up meanwhile.
    """
    deadline = deadline or Deadline()
    program = _Program(network)
    deadline.check()
    try:
        solution = program.solve(solver(deadline))
    except NoSolution as error:
        deadline.check()
        deadline.cut_short |= error.timed_out
        raise
    deadline.check()
    deadline.cut_short |= solution.gap > RELATIVE_GAP
    return solution


class _Program:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.problem = pulp.LpProblem("rhino", pulp.LpMinimize)
        self.seconds: dict[pulp.LpVariable, float] = {}
        self.late: dict[pulp.LpVariable, float] = {}
        self.chosen = [self._one_hot(i) for i in range(len(network.nodes))]
        for number, moves in enumerate(network.moves):
            self._moves(number, moves)
        # Solvers' tolerances are absolute: what a step takes is to be of the order of 1000.
        least = sum(float(node.seconds.min()) for node in network.nodes)
        most = max(map(abs, (*self.seconds.values(), *self.late.values())), default=1.0)
        self.scale = 1e3 / max(least, 1e-3 * most, 1e-12)
        self._exposed()

    def _one_hot(self, i: int) -> list[pulp.LpVariable | None]:
        node = self.network.nodes[i]
        found: list[pulp.LpVariable | None] = [None] * node.size
        for j in np.flatnonzero(np.isfinite(node.seconds)):
            found[j] = variable = self.problem.add_variable(f"X_{i}_{j}", cat=pulp.LpBinary)
            self.seconds[variable] = float(node.seconds[j])
            self.late[variable] = float(node.late[j])
        allowed = {x: 1 for x in found if x is not None}
        if not allowed:
            raise NoSolution(False)
        self._add(allowed, pulp.LpConstraintEQ, 1, f"one_{i}")
        return found

    def _states(self, node: int, states: np.ndarray) -> dict[int, list[pulp.LpVariable]]:
        """By state, the choices of `node` that are in it."""
        found: dict[int, list[pulp.LpVariable]] = {}
        for x, state in zip(self.chosen[node], states, strict=True):
            if x is not None:
                found.setdefault(int(state), []).append(x)
        return found

    def _moves(self, number: int, moves: Moves) -> None:
        left = self._states(moves.source, moves.made)
        shared: dict[tuple[int, int], list[pulp.LpVariable]] = {}
        for r, (node, needs) in enumerate(moves.readers):
            needed = self._states(node, needs)
            if _is_free(moves, left, needed):
                continue
            for state, product in self._products(f"{number}_{r}", moves, left, needed).items():
                shared.setdefault(state, []).append(product)
        for (p, q), products in shared.items():
            seconds, late = float(moves.seconds[p, q]), float(moves.late[p, q])
            if seconds or late:
                once = self._once(f"{number}_{p}_{q}", products)
                self.seconds[once] = seconds
                self.late[once] = late

    def _products(
        self,
        name: str,
        moves: Moves,
        left: dict[int, list[pulp.LpVariable]],
        needed: dict[int, list[pulp.LpVariable]],
    ) -> dict[tuple[int, int], pulp.LpVariable]:
        products = {
            (p, q): self.problem.add_variable(f"A_{name}_{p}_{q}", 0, 1)
            for p in left
            for q in needed
            if np.isfinite(moves.seconds[p, q])
        }
        for p, choices in left.items():
            row = {a: 1 for (p_, _), a in products.items() if p_ == p}
            self._add({**row, **dict.fromkeys(choices, -1)}, 0, 0, f"from_{name}_{p}")
        for q, choices in needed.items():
            column = {a: 1 for (_, q_), a in products.items() if q_ == q}
            self._add({**column, **dict.fromkeys(choices, -1)}, 0, 0, f"to_{name}_{q}")
        return products

    def _once(self, name: str, products: Sequence[pulp.LpVariable]) -> pulp.LpVariable:
        if len(products) == 1:
            return products[0]
        once = self.problem.add_variable(f"B_{name}", 0, 1)
        for r, product in enumerate(products):
            self._add({once: 1, product: -1}, pulp.LpConstraintGE, 0, f"once_{name}_{r}")
        return once

    def _exposed(self) -> None:
        late = {x: seconds for x, seconds in self.late.items() if seconds}
        if any(seconds > 0 for seconds in late.values()):
            exposed = self.problem.add_variable("E", 0)
            self.seconds[exposed] = 1.0 / self.scale
            negative = {x: -self.scale * seconds for x, seconds in late.items()}
            self._add({exposed: 1, **negative}, pulp.LpConstraintGE, 0, "exposed")

    def _add(
        self, terms: Mapping[pulp.LpVariable, float], sense: int, right: float, name: str
    ) -> None:
        self.problem.addConstraint(
            pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, name, right)
        )

    def solve(self, solver: pulp.LpSolver) -> Solution:
        self.problem.setObjective(
            pulp.LpAffineExpression({x: self.scale * c for x, c in self.seconds.items()})
        )
        self.problem.solve(solver)
        if self.problem.status == pulp.LpStatusInfeasible:
            raise NoSolution(False)
        picks = []
        for choices in self.chosen:
            values = [0.0 if x is None else x.value() or 0.0 for x in choices]
            if max(values) < 0.5:
                raise NoSolution(True)
            picks.append(int(np.argmax(values)))
        return Solution(tuple(picks), self.network.cost(picks), gap_of(self.problem))


def _is_free(moves: Moves, left: Collection[int], needed: Collection[int]) -> bool:
    """Whether no move between these states costs anything."""
    states = np.ix_(list(left), list(needed))
    return not (moves.seconds[states].any() or moves.late[states].any())
