"""The integer linear program of stages (Rhino §5.1).

For unit i and stage k > 0 there is a binary X_ik: i is in stage k or a later one.

    X_i,k+1 <= X_ik                                     (`_order`)
    X_ik <= X_jk           where j reads i              (`_order`)
    Z_ik = X_ik - X_i,k+1  i is in stage k

§5.1 has an integer B_i = sum_k X_ik instead, and F_ij <= B_j - B_i <= M F_ij for what is sent. Here
each tensor t of unit i has a continuous Y_tk, that it is sent to stage k (`_sent`):

    Y_tk >= Z_jk - Z_ik    for each reader j            Y_tk >= 0

which is 1 once for each other stage that reads it, and tighter where X is not integer: from a stage
to the next, big M lets F be 1 / M. Of a tied weight w, U_wk says that stage k reads it:

    U_wk >= Z_ik           for each reader i

Each stage has a unit, and takes no more than it may (`_balance`):

    sum_i Z_ik >= 1        pace_k sum_i Z_ik seconds_i <= most_seconds

and where the devices of actor a have little room (`memory_budget`, `limit_held`):

    sum over its stages k, over i, of Z_ik held_ik <= limit_a

Bounds on the stage of a unit fix its X where they are known. A stage k > 0 that holds none of the
units that read nothing receives something: at least what the least of the others reads. That is
implied at integer X, and makes the relaxation of a chain tight (`_received`).

The objective is sum Y_tk bytes_t + sum (sum_k U_wk - 1) bytes_w.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import pulp

from tfpar.planning.deadline import Deadline
from tfpar.planning.inter_op.stages.bounds import Bounds, seed_each_stage
from tfpar.planning.inter_op.stages.memory_budget import MemoryBudget
from tfpar.planning.inter_op.stages.order_partition import Stages
from tfpar.planning.inter_op.stages.slowdowns import Paces, balanced_seconds, normalize_slowdowns
from tfpar.planning.inter_op.stages.units import UnitGraph
from tfpar.planning.solver import RELATIVE_GAP, gap_of, solver

TIME_LIMIT_S = 5.0
"""Time limit of one program, in seconds: most take less than one. Programs of nearly as many stages
as units would go on for minutes; of them the best is used that was found by then."""

SOLVER_SLACK = 1e-6
"""By how much, relatively, a stage may take more than it may: what solvers let a row be missed by.
With less, HiGHS finds programs of very unequal units infeasible that are not."""


def minimize_traffic(
    graph: UnitGraph,
    bounds: Bounds,
    num_stages: int,
    most_seconds: float,
    start: Sequence[int],
    deadline: Deadline,
    paces: Paces | None = None,
    rooms: MemoryBudget | None = None,
) -> tuple[Stages, float]:
    """Find the stages that send least, and how far, at most, they are above the least, relatively.

    Args:
        bounds: of each unit, the stages in which it can be.
        most_seconds: that a stage may take.
        start: an assignment that keeps to all this, for the case that nothing better is found in
            time.
        paces: of stages; by default all 1.
        rooms: what the devices of stages can hold; None: everything.

    Raises:
        SearchStopped: the search was given up meanwhile.
    """
    start = tuple(start)
    if not graph.sent_bytes(start) or deadline.over():
        return start, float("inf") if graph.sent_bytes(start) else 0.0
    program = StageIlp(graph, bounds, num_stages, paces)
    if most_seconds:
        program.limit_seconds(most_seconds)
    if rooms is not None:
        program.limit_held(rooms)
    program.minimize_sent(1e3 / graph.sent_bytes(start))
    found = program.solve(deadline)
    gap = gap_of(program.problem) if found is not None else float("inf")
    deadline.cut_short |= gap > RELATIVE_GAP
    if found is None or graph.sent_bytes(found) > graph.sent_bytes(start):
        return start, gap
    return found, gap


def minimize_bottleneck(
    graph: UnitGraph,
    bounds: Bounds,
    num_stages: int,
    deadline: Deadline,
    paces: Paces | None = None,
    rooms: MemoryBudget | None = None,
) -> Stages:
    """Find the stages of which the slowest takes least; or, if none are found in time, or there is
    room for none, any.

    Raises:
        SearchStopped: the search was given up meanwhile.
    """
    if not deadline.over():
        program = StageIlp(graph, bounds, num_stages, paces)
        if rooms is not None:
            program.limit_held(rooms)
        program.minimize_slowest()
        found = program.solve(deadline)
        if found is not None:
            deadline.cut_short |= gap_of(program.problem) > RELATIVE_GAP
            return found
    deadline.cut_short = True
    return _any_stages(graph, bounds, num_stages)


def _any_stages(graph: UnitGraph, bounds: Bounds, num_stages: int) -> Stages:
    """Some assignment: one unit for each stage, and the others as early as they can be.

    Bounds never fall along an edge, so of two that are placed the one that is read comes first.
    """
    stages = [first for first, _ in bounds]
    for stage, unit in seed_each_stage(bounds, num_stages).items():
        stages[unit] = stage
    for i, j in sorted(graph.edges):
        stages[j] = max(stages[j], stages[i])
    return tuple(stages)


@dataclasses.dataclass
class _Sum:
    """A linear expression."""

    terms: dict[pulp.LpVariable, float] = dataclasses.field(default_factory=dict)
    constant: float = 0.0

    def add(self, other: _Sum, times: float = 1.0) -> _Sum:
        for variable, factor in other.terms.items():
            self.terms[variable] = self.terms.get(variable, 0.0) + times * factor
        self.constant += times * other.constant
        return self


class StageIlp:
    """The variables and constraints of the module's docstring; what it minimizes is to be said.

    Attributes:
        problem: of PuLP.
    """

    def __init__(
        self, graph: UnitGraph, bounds: Bounds, num_stages: int, paces: Paces | None = None
    ) -> None:
        self.graph = graph
        self.num_stages = num_stages
        self.paces = normalize_slowdowns(paces, num_stages)
        self.problem = pulp.LpProblem("stages", pulp.LpMinimize)
        self._bounds = bounds
        self._later = {
            (i, k): self.problem.add_variable(f"X_{i}_{k}", cat=pulp.LpBinary)
            for i, (first, last) in enumerate(bounds)
            for k in range(first + 1, last + 1)
        }
        self._order()
        for k in range(num_stages):
            self._at_least(self._within(k, {i: 1.0 for i in range(len(bounds))}), 1.0)

    def limit_seconds(self, most_seconds: float) -> None:
        """Let no stage take more than `most_seconds`, which are more than none."""
        for k in range(self.num_stages):
            taken = _Sum().add(self._taken(k, most_seconds), -1.0)
            self._at_least(taken, -1.0 - SOLVER_SLACK)

    def limit_held(self, rooms: MemoryBudget) -> None:
        """Let no rank hold more than it has room for."""
        for actor, limit in enumerate(rooms.limits):
            scale = max(abs(limit), 1.0)
            held = _Sum()
            for k in (k for k in range(self.num_stages) if rooms.actors[k] == actor):
                sizes = {i: rooms.of_unit(u, k) / scale for i, u in enumerate(self.graph.units)}
                held.add(self._within(k, {i: size for i, size in sizes.items() if size}), -1.0)
            if math.isfinite(limit):
                self._at_least(held, -limit / scale)

    def minimize_slowest(self) -> None:
        """Make the slowest stage as fast as can be."""
        slowest = self.problem.add_variable("T", 0)
        average = balanced_seconds(self.graph.seconds, self.paces)
        for k in range(self.num_stages):
            taken = _Sum().add(self._taken(k, average), -1.0)
            self._at_least(taken.add(_Sum({slowest: 1.0})), 0.0)
        self.problem.setObjective(pulp.LpAffineExpression({slowest: 1e3}))

    def minimize_sent(self, scale: float) -> None:
        """Make what is sent as little as can be.

        Args:
            scale: of the objective: solvers' tolerances are absolute, and the optimum is best of
                the order of 1000.
        """
        objective = _Sum()
        received = [_Sum() for _ in range(self.num_stages)]
        for number, flow in enumerate(self.graph.flows):
            if not flow.num_bytes:
                continue
            for k, sent in self._once(f"Y_{number}", flow.readers, flow.source).items():
                received[k].add(_Sum({sent: flow.num_bytes * scale}))
                objective.add(_Sum({sent: flow.num_bytes * scale}))
        for number, tie in enumerate(self.graph.ties):
            for read in self._once(f"U_{number}", tie.readers, None).values():
                objective.add(_Sum({read: tie.num_bytes * scale}))
        self._received(received, scale)
        self.problem.setObjective(pulp.LpAffineExpression(objective.terms))

    def solve(self, deadline: Deadline) -> Stages | None:
        """Return the best stages found in time, if any.

        Raises:
            SearchStopped: the search was given up meanwhile.
        """
        self.problem.solve(solver(deadline, TIME_LIMIT_S))
        deadline.check()
        stages = [first for first, _ in self._bounds]
        for (i, _), variable in self._later.items():
            value = variable.value()
            if value is None:
                return None
            stages[i] += round(value)
        in_order = all(stages[i] <= stages[j] for i, j in self.graph.edges)
        return tuple(stages) if in_order and len({*stages}) == self.num_stages else None

    # --- constraints ------------------------------------------------------------------------

    def _order(self) -> None:
        for (i, k), variable in self._later.items():
            if (i, k + 1) in self._later:
                self._at_least(_Sum({variable: 1.0}).add(self._from(i, k + 1), -1.0), 0.0)
        for i, j in self.graph.edges:
            for k in range(self._bounds[j][0] + 1, self._bounds[i][1] + 1):
                self._at_least(_Sum().add(self._from(j, k)).add(self._from(i, k), -1.0), 0.0)

    def _once(
        self, name: str, readers: Sequence[int], source: int | None
    ) -> dict[int, pulp.LpVariable]:
        """By stage, whether it holds a reader, and not the source if there is one."""
        found = {}
        for k in range(self.num_stages):
            here = [j for j in readers if self._bounds[j][0] <= k <= self._bounds[j][1]]
            if not here or (source is not None and self._bounds[source] == (k, k)):
                continue
            found[k] = once = self.problem.add_variable(f"{name}_{k}", 0, 1)
            for j in here:
                row = _Sum({once: 1.0}).add(self._in(j, k), -1.0)
                self._at_least(row if source is None else row.add(self._in(source, k)), 0.0)
        return found

    def _received(self, received: Sequence[_Sum], scale: float) -> None:
        incoming = [0.0] * len(self._bounds)
        reading: set[int] = set()
        for flow in self.graph.flows:
            for j in flow.readers:
                incoming[j] += flow.num_bytes * scale
                reading.add(j)
        sources = {i: 1.0 for i in range(len(self._bounds)) if i not in reading}
        for k in range(1, self.num_stages):
            able = (j for j in reading if self._bounds[j][0] <= k <= self._bounds[j][1])
            least = min((incoming[j] for j in able), default=0.0)
            if least:
                self._at_least(received[k].add(self._within(k, sources), least), least)

    def _at_least(self, row: _Sum, right: float) -> None:
        if row.terms:
            expression = pulp.LpAffineExpression(row.terms)
            constraint = pulp.LpConstraint(
                expression, pulp.LpConstraintGE, None, right - row.constant
            )
            self.problem.addConstraint(constraint)

    # --- expressions --------------------------------------------------------------------------

    def _from(self, i: int, k: int) -> _Sum:
        """Whether unit i is in stage k or a later one."""
        variable = self._later.get((i, k))
        if variable is not None:
            return _Sum({variable: 1.0})
        return _Sum(constant=1.0 if k <= self._bounds[i][0] else 0.0)

    def _in(self, i: int, k: int) -> _Sum:
        """Whether unit i is in stage k."""
        return _Sum().add(self._from(i, k)).add(self._from(i, k + 1), -1.0)

    def _within(self, k: int, parts: Mapping[int, float]) -> _Sum:
        """The parts of the units in stage k, together."""
        total = _Sum()
        for i, part in parts.items():
            if self._bounds[i][0] <= k <= self._bounds[i][1]:
                total.add(self._in(i, k), part)
        return total

    def _taken(self, k: int, seconds: float) -> _Sum:
        """Return the time of the units in stage k at its pace, in units of `seconds`."""
        working = ((i, unit.seconds) for i, unit in enumerate(self.graph.units) if unit.seconds)
        return self._within(k, {i: own * self.paces[k] / seconds for i, own in working})
