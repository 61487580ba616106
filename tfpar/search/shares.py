"""Unequal shares of the batch for ranks of unequal speed, once the plan is found.

Ranks wait for each other where they sum gradients, so the slowest one's time counts. Each
coordinate of a mesh axis that splits the batch is priced at the rates of its own devices, with its
own share; the shares are those that let all take about as long.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.evaluate import evaluate
from tfpar.ir.roles import Roles
from tfpar.plans import Plan
from tfpar.propagation.partitioned import PartitionedGraph
from tfpar.propagation.shares import CannotShare, check_shares, seen_by
from tfpar.spec import Mesh, UnevenMesh, apportioned

MIN_SAVING = 0.02
"""The part of a step that shares have to save. As with chunks (`search.chunks`), one plan is
compared with itself."""

_ROUNDS = 4
"""How often shares are set by what the last ones let ranks take: samples take about as long each,
beside what does not depend on them (the update, the start of ops), so few are needed."""


def uneven_axes(plan: Plan, cluster: Cluster) -> list[int]:
    """The axes that split the batch of `plan` along which devices of `cluster` differ."""
    if plan.in_microbatches or plan.chunks > 1 or cluster.one_memory:
        return []
    mesh = plan.mesh
    return [
        axis
        for axis in map(mesh.axis, plan.batch_axes)
        if len({cluster.at_pace_of(ranks).device for ranks in ranks_along(mesh, axis)}) > 1
    ]


def ranks_along(mesh: Mesh, axis: int) -> list[list[int]]:
    """The ranks of each coordinate of `axis`."""
    found: list[list[int]] = [[] for _ in range(mesh.shape[axis])]
    for rank in range(mesh.size):
        found[mesh.coordinates(rank)[axis]].append(rank)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class StepByRank:
    """A planned step, which is priced at the rates of those that run it.

    Attributes:
        laid: what `plan` makes of the step.
        roles: of its graph.
        cluster: the machines.
        state_ratio: see `evaluate`.
    """

    plan: Plan
    laid: PartitionedGraph
    roles: Roles
    cluster: Cluster
    state_ratio: float | None

    def even(self, axis: int) -> list[Cost]:
        """What a step costs with equal shares, at each coordinate of `axis`."""
        return [
            evaluate(self.laid, machines, self.roles, self.state_ratio)
            for machines in self._machines(axis)
        ]

    def uneven(self, mesh: UnevenMesh) -> list[Cost]:
        """What it costs with the shares of `mesh`, at each coordinate of its uneven axis.

        Raises:
            CannotShare: the step does not split so.
        """
        check_shares(self.laid, mesh)
        machines = self._machines(mesh.uneven_axis)
        return [
            evaluate(seen_by(self.laid, mesh.seen_from(rank)), own, self.roles, self.state_ratio)
            for rank, own in zip(mesh.representatives, machines, strict=True)
        ]

    def _machines(self, axis: int) -> list[Cluster]:
        return [self.cluster.at_pace_of(ranks) for ranks in ranks_along(self.plan.mesh, axis)]


def in_shares(step: StepByRank, batch_size: int, memory_limit: float) -> Plan:
    """The plan of `step` with the shares of the batch that make it fastest, and with its cost then;
    as it is, if none are faster than equal ones.

    Args:
        memory_limit: bytes that a device may store.
    """
    best = plan = step.plan
    for axis in uneven_axes(plan, step.cluster):
        even = step.even(axis)
        least = (1 - MIN_SAVING) * slowest(even).seconds
        if best.shares and best.cost is not None:
            least = min(least, best.cost.seconds)
        for shares, costs in _tried(step, axis, even, batch_size):
            cost = slowest(costs)
            if cost.seconds < least and cost.memory_bytes <= memory_limit:
                found = {plan.mesh.axis_names[axis]: shares}
                best = dataclasses.replace(plan, shares=found, cost=cost, passed_over=None)
                least = cost.seconds
    return best


def _tried(
    step: StepByRank, axis: int, even: Sequence[Cost], batch_size: int
) -> Iterator[tuple[tuple[int, ...], list[Cost]]]:
    """Shares along `axis`, and what each coordinate takes with them.

    The first are as the speeds of coordinates, the next follow from what those before gave.
    """
    mesh, batch_axes = step.plan.mesh, map(step.plan.mesh.axis, step.plan.batch_axes)
    units, rest = divmod(batch_size, mesh.group_size(tuple(a for a in batch_axes if a != axis)))
    if rest or units < len(even):
        return
    equal = units / len(even)
    points = [(equal, cost.seconds) for cost in even]
    lines = [_Line(0.0, sum(cost.compute_s) / equal) for cost in even]
    known = set()
    for _ in range(_ROUNDS):
        shares = apportioned(units, _balanced(lines, units))
        if shares in known or len(set(shares)) == 1:
            return
        known.add(shares)
        try:
            costs = step.uneven(UnevenMesh.over(mesh, axis, shares))
        except CannotShare:
            return
        yield shares, costs
        before, points = points, [(n, cost.seconds) for n, cost in zip(shares, costs, strict=True)]
        lines = [
            line if one[0] == other[0] else _Line.through(one, other)
            for line, one, other in zip(lines, before, points, strict=True)
        ]


class _Line(NamedTuple):
    """The seconds of a step by how many samples a rank has of it."""

    fixed: float
    each: float

    @classmethod
    def through(cls, one: tuple[float, float], other: tuple[float, float]) -> _Line:
        """Two points (samples, seconds)."""
        each = max((other[1] - one[1]) / (other[0] - one[0]), 1e-3 * one[1] / one[0])
        return cls(one[1] - each * one[0], each)


def _balanced(lines: Sequence[_Line], units: int) -> list[float]:
    """Shares of `units` with which all take as long; next to nothing where that is too long."""
    used = [*lines]
    while True:
        rate = math.fsum(1 / line.each for line in used)
        seconds = (units + math.fsum(line.fixed / line.each for line in used)) / rate
        fitting = [line for line in used if line.fixed < seconds]
        if len(fitting) == len(used):
            break
        used = fitting
    return [max((seconds - line.fixed) / line.each, 1e-9 * units) for line in lines]


def slowest(costs: Sequence[Cost]) -> Cost:
    """What a step costs whose ranks take these: the times of the slowest, the most memory."""
    fullest = max(costs, key=lambda cost: cost.memory_bytes)
    sizes = ("weight_bytes", "state_bytes", "gradient_bytes", "activation_bytes", "live_bytes")
    return dataclasses.replace(
        max(costs, key=lambda cost: cost.seconds), **{n: getattr(fullest, n) for n in sizes}
    )
