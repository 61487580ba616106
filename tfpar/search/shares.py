"""Unequal shares of the batch for ranks of unequal speed, once the plan is found.

Ranks wait for each other where they sum gradients, so the slowest one's time counts. Each
coordinate of a mesh axis that splits the batch is priced at the rates of its own devices, with its
own share; the shares are those that let all take about as long. In a pipeline a coordinate is one
rank of each stage, from the first to the last: each of them has the same share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.evaluate import evaluate
from tfpar.cost.microbatches import microbatched_cost
from tfpar.cost.overlap import chunked_cost
from tfpar.cost.staged import StagedCost
from tfpar.ir.roles import Roles
from tfpar.pipeline.statistics import EXACT, BatchStatistics
from tfpar.plans import Plan
from tfpar.propagation.partitioned import PartitionedGraph
from tfpar.propagation.shares import CannotShare, shared_by
from tfpar.search.stages.priced import CutPlan
from tfpar.spec import Mesh, UnevenMesh

MIN_SAVING = 0.02
"""The part of a step that shares have to save. As with chunks (`search.chunks`), one plan is
compared with itself."""

_ROUNDS = 4
"""How often shares are set by what the last ones let ranks take: samples take about as long each,
beside what does not depend on them (the update, the start of ops), so few are needed."""


def uneven_axes(plan: Plan, cluster: Cluster) -> list[int]:
    """The axes that split the batch of `plan` along which devices of `cluster` differ, be it in one
    stage."""
    if cluster.one_memory:
        return []
    mesh, parts = plan.mesh, _parts(plan, cluster)
    return [
        axis
        for axis in map(mesh.axis, plan.batch_axes)
        if any(
            len({part.at_pace_of(ranks).device for ranks in ranks_along(mesh, axis)}) > 1
            for part in parts
        )
    ]


def _parts(plan: Plan, cluster: Cluster) -> list[Cluster]:
    """The machines of each set of ranks."""
    if plan.stages is None:
        return [cluster]
    return [cluster.part(group) for group in plan.stages.groups(plan.mesh.size)]


def ranks_along(mesh: Mesh, axis: int) -> list[list[int]]:
    """The ranks of each coordinate of `axis`."""
    found: list[list[int]] = [[] for _ in range(mesh.shape[axis])]
    for rank in range(mesh.size):
        found[mesh.coordinates(rank)[axis]].append(rank)
    return found


class Priced(Protocol):
    """A planned step, which is priced at the rates of those that run it."""

    def at(self, plan: Plan, ranks: Sequence[int], mesh: UnevenMesh | None) -> Plan:
        """`plan` with what a step costs at the pace of these ranks of its mesh.

        Args:
            mesh: as they see it, if they have unequal shares of the batch.

        Raises:
            CannotShare: the step does not split in these shares.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class WholeStep:
    """A step whose ranks all run all of it.

    Attributes:
        laid: what a plan makes of it.
        roles: of its graph.
        cluster: the machines.
        state_ratio: see `evaluate`.
        cut: the same in the plan's chunks or microbatches, if there are any.
        statistics: of the batch, those that each microbatch has of its own.
    """

    laid: PartitionedGraph
    roles: Roles
    cluster: Cluster
    state_ratio: float | None
    cut: PartitionedGraph | None = None
    statistics: BatchStatistics = EXACT

    def at(self, plan: Plan, ranks: Sequence[int], mesh: UnevenMesh | None) -> Plan:
        machines, laid, cut = self.cluster.at_pace_of(ranks), self.laid, self.cut
        if mesh is not None:
            laid, cut = shared_by(laid, mesh), cut and shared_by(cut, mesh)
        cost = evaluate(laid, machines, self.roles, self.state_ratio)
        if cut is not None and plan.microbatches > 1:
            cost = microbatched_cost(cost, cut, laid.mesh, machines, self.roles, self.statistics)
        elif cut is not None:
            cost = chunked_cost(cost, cut, laid.mesh, machines, self.roles)
        return dataclasses.replace(plan, cost=cost)


@dataclasses.dataclass(frozen=True, eq=False)
class StepOfStages:
    """A step in stages.

    Attributes:
        cut: in those of a plan.
        cluster: the machines of all ranks.
    """

    cut: CutPlan
    cluster: Cluster

    def at(self, plan: Plan, ranks: Sequence[int], mesh: UnevenMesh | None) -> Plan:
        before, priced = plan.stages, self.cut.priced(plan, self.cluster, ranks, mesh)
        stages = priced.stages
        if before is None or before.cost is None or stages is None or stages.cost is None:
            return priced
        # What the schedule was picked from is still told.
        cost = dataclasses.replace(stages.cost, schedules=before.cost.schedules)
        return dataclasses.replace(priced, stages=dataclasses.replace(stages, cost=cost))


def priced_along(
    step: Priced, plan: Plan, cluster: Cluster, axis: int, mesh: UnevenMesh | None = None
) -> list[Plan]:
    """`plan` with what a step costs at each coordinate of `axis`; see `Priced.at`.

    Args:
        mesh: with the shares of the coordinates, if they are unequal.
    """
    parts, known, found = _parts(plan, cluster), {}, []
    for at, ranks in enumerate(ranks_along(plan.mesh, axis)):
        own = None if mesh is None else mesh.seen_from(ranks[0])
        share = None if mesh is None else mesh.shares[at]
        key: Hashable = share, tuple(part.at_pace_of(ranks) for part in parts)
        if key not in known:
            known[key] = step.at(plan, ranks, own)
        found.append(known[key])
    return found


def in_own_shares(step: Priced, plan: Plan, cluster: Cluster, batch_size: int | None) -> Plan:
    """`plan`, which was priced in equal shares, with what it costs in those that it has.

    Args: as of `in_shares`.
    """
    for mesh in plan.uneven_meshes(batch_size):
        with contextlib.suppress(CannotShare):
            return slowest(priced_along(step, plan, cluster, mesh.uneven_axis, mesh))
    return plan


def slowest_ranks(
    step: Priced, plan: Plan, cluster: Cluster, batch_size: int | None
) -> tuple[Sequence[int], UnevenMesh | None]:
    """The ranks of a plan's mesh that take longest with its shares, and the mesh as they see it; of
    equal shares, all.

    Args: as of `in_shares`.
    """
    for mesh in plan.uneven_meshes(batch_size):
        with contextlib.suppress(CannotShare):
            along = priced_along(step, plan, cluster, mesh.uneven_axis, mesh)
            at = max(range(len(along)), key=lambda i: _seconds(along[i]))
            ranks = ranks_along(mesh, mesh.uneven_axis)[at]
            return ranks, mesh.seen_from(ranks[0])
    return (), None


def in_shares(
    step: Priced, plan: Plan, cluster: Cluster, batch_size: int, memory_limit: float
) -> Plan:
    """`plan` with the shares of the batch that make it fastest, and with its cost then; as it is,
    if none are faster than equal ones.

    Args:
        step: that it is for.
        cluster: the machines of all ranks.
        memory_limit: bytes that a device may store; of stages, their own devices say it.
    """
    best = plan
    for axis in uneven_axes(plan, cluster):
        even = priced_along(step, plan, cluster, axis)
        least = (1 - MIN_SAVING) * _seconds(slowest(even))
        if best.shares:
            least = min(least, _seconds(best))
        for mesh, along in _tried(step, plan, cluster, axis, even, batch_size):
            found = slowest(along)
            if _seconds(found) < least and found.fits(memory_limit):
                each = batch_size // sum(mesh.shares)
                shares = {mesh.axis_names[axis]: tuple(n * each for n in mesh.shares)}
                best = dataclasses.replace(found, shares=shares, passed_over=None)
                least = _seconds(best)
    return best


def _tried(
    step: Priced, plan: Plan, cluster: Cluster, axis: int, even: Sequence[Plan], batch_size: int
) -> Iterator[tuple[UnevenMesh, list[Plan]]]:
    """Shares along `axis`, and what each coordinate takes with them.

    The first are as the speeds of coordinates, the next follow from what those before gave.
    """
    for units in plan.shared_units(batch_size, axis):
        try:
            yield from _tried_in(units, step, plan, cluster, axis, even)
            return
        except CannotShare:
            continue


def _tried_in(
    units: int, step: Priced, plan: Plan, cluster: Cluster, axis: int, even: Sequence[Plan]
) -> Iterator[tuple[UnevenMesh, list[Plan]]]:
    """The same of so many units each.

    Raises:
        CannotShare: the step does not split so.
    """
    equal = units / len(even)
    points = [(equal, _seconds(found)) for found in even]
    lines = [Line(0.0, sum(_cost(found).compute_s) / equal) for found in even]
    known = set()
    for _ in range(_ROUNDS):
        shares = shared_out(lines, units)
        if shares in known or len(set(shares)) == 1:
            return
        known.add(shares)
        mesh = UnevenMesh.over(plan.mesh, axis, shares)
        along = priced_along(step, plan, cluster, axis, mesh)
        yield mesh, along
        before, points = points, [(n, _seconds(f)) for n, f in zip(shares, along, strict=True)]
        lines = [
            line if one[0] == other[0] else Line.through(one, other)
            for line, one, other in zip(lines, before, points, strict=True)
        ]


class Line(NamedTuple):
    """The seconds of a step by how many samples a rank has of it."""

    fixed: float
    each: float

    def seconds(self, samples: float) -> float:
        return self.fixed + self.each * samples

    @classmethod
    def through(cls, one: tuple[float, float], other: tuple[float, float]) -> Line:
        """Two points (samples, seconds)."""
        each = max((other[1] - one[1]) / (other[0] - one[0]), 1e-3 * one[1] / one[0])
        return cls(one[1] - each * one[0], each)


def shared_out(lines: Sequence[Line], units: int) -> tuple[int, ...]:
    """`units`, at least one for each line, with which the longest takes least; of equal ones the
    first gets more."""
    shares = [1] * len(lines)
    # One more goes where it takes least: none could have gone to another and ended sooner.
    waiting = [(line.seconds(2), i) for i, line in enumerate(lines)]
    heapq.heapify(waiting)
    for _ in range(units - len(lines)):
        _, i = waiting[0]
        shares[i] += 1
        heapq.heapreplace(waiting, (lines[i].seconds(shares[i] + 1), i))
    return tuple(shares)


SIZES = (
    "weight_bytes",
    "state_bytes",
    "gradient_bytes",
    "activation_bytes",
    "copied_bytes",
    "gathered_bytes",
    "live_bytes",
    "host_slot_bytes",
    "host_activation_bytes",
)
"""The fields of a `Cost` that say what a rank stores."""


def slowest(along: Sequence[Plan]) -> Plan:
    """A plan whose ranks take these: the times of the slowest, the most memory."""
    found = max(along, key=_seconds)
    fullest = _cost(max(along, key=_filled))
    cost = dataclasses.replace(_cost(found), **{n: getattr(fullest, n) for n in SIZES})
    stages = found.stages
    if stages is not None:
        stages = dataclasses.replace(stages, cost=_slowest_stages(list(map(_staged, along))))
    return dataclasses.replace(found, cost=cost, stages=stages)


def _slowest_stages(along: Sequence[StagedCost]) -> StagedCost:
    """The same stage by stage; the most memory is what leaves least of what a rank may hold."""
    slow = max(along, key=lambda cost: cost.seconds)
    sizes = (
        *("in_flight", "fixed_bytes", "kept_bytes", "peak_bytes", "peak_task", "limit_bytes"),
        *("host_bytes", "host_limit_bytes"),
    )
    stages = []
    for stage, own in enumerate(slow.stages):
        each = [cost.stages[stage] for cost in along]
        fullest = max(each, key=lambda share: (share.excess_bytes, share.peak_bytes))
        stages.append(dataclasses.replace(own, **{n: getattr(fullest, n) for n in sizes}))
    return dataclasses.replace(slow, stages=tuple(stages))


def _filled(plan: Plan) -> float:
    """The bytes that a rank stores; in stages, beyond what it may."""
    if plan.stages is None:
        return _cost(plan).memory_bytes
    staged = _staged(plan)
    return staged.stages[staged.fullest].excess_bytes


def _staged(plan: Plan) -> StagedCost:
    assert plan.stages is not None and plan.stages.cost is not None, "a plan that was priced"
    return plan.stages.cost


def _cost(plan: Plan) -> Cost:
    assert plan.cost is not None, "a plan that was priced"
    return plan.cost


def _seconds(plan: Plan) -> float:
    return _cost(plan).seconds
