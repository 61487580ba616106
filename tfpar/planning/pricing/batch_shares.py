"""Unequal shares of the batch for ranks of unequal speed, once the plan is found.

Ranks wait for each other where they sum gradients, so the slowest one's time counts. Each
coordinate of a mesh axis that splits the batch is priced at the rates of its own devices, with its
own share; the shares are those that let all take about as long. In a pipeline a coordinate is one
rank of each stage, from the first to the last: each of them has the same share. Stages of another
layout have shares of their own.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.planning.pricing.price import (
    ShareAxis,
    StepPricer,
    ViewedPlan,
    actor_clusters,
    combine_slowest,
    cost_of,
    layout_seconds,
    price_along,
    ranks_along,
    seconds_of,
)
from tfpar.plans import Plan
from tfpar.plans.shares import shared_units
from tfpar.propagation.uneven_batch import UnevenSplitError
from tfpar.spec import UnevenMesh

MIN_SAVING = 0.02
"""The part of a step that shares have to save. As with chunks (`planning.pricing.chunks`), one plan
is compared with itself."""

_ROUNDS = 4
"""Number of times that shares are set by the times under the last ones: samples take about as long
each, beside what does not depend on them (the update, the start of ops), so few are needed."""


def uneven_axes(plan: Plan, cluster: Cluster) -> list[ShareAxis]:
    """Return the axes that split the batch in the layouts of `plan` along which devices of
    `cluster` differ, be it in one stage."""
    if cluster.one_memory:
        return []
    layouts, found = plan.by_layout, []
    for number, one in enumerate(layouts):
        mesh, parts = one.mesh, actor_clusters(plan, cluster, number)
        axes = [mesh.axis(name) for name in one.batch_axes]
        if len(layouts) > 1:  # ranks share microbatches, by strides that are alike along later axes
            axes = sorted(axes)[-1:]
        found += [
            ShareAxis(number, axis)
            for axis in axes
            if any(
                len({part.at_pace_of(ranks).device for ranks in ranks_along(mesh, axis)}) > 1
                for part in parts
            )
        ]
    return found


def optimize_shares(
    step: StepPricer, plan: Plan, cluster: Cluster, batch_size: int, memory_limit: float
) -> Plan:
    """Return `plan` with the shares of the batch that make it fastest, and with its cost then; as
    it is, if none are faster than equal ones.

    Args:
        step: that it is for.
        cluster: the machines of all ranks.
        memory_limit: bytes that a device may store; of stages, their own devices say it.
    """
    best: dict[int, _Shares] = {}
    for axis in uneven_axes(plan, cluster):
        found = _best_along(step, plan, cluster, axis, batch_size, memory_limit)
        if found is not None:
            known = best.get(axis.layout, found)
            best[axis.layout] = min(known, found, key=lambda one: one.seconds)
    if not best:
        return plan
    shares = [*best.values()]
    even, shared = shares[0].even, shares[0].plan
    if len(shares) > 1:
        equal, unequal = ([getattr(one, n) for one in shares] for n in ("equal", "unequal"))
        even, shared = (_combined(price_along(step, plan, cluster, *a)) for a in (equal, unequal))
    if seconds_of(shared) >= (1 - MIN_SAVING) * seconds_of(even) or not shared.fits(memory_limit):
        return plan
    for one in shares:
        shared = _with_shares(shared, one.unequal, batch_size)
    return shared.with_findings(passed_over=None)


class _Shares(NamedTuple):
    """Shares along an axis that pay.

    Attributes:
        equal, unequal: the axis.
        even, plan: the plan in equal shares and in these, others being equal.
        seconds: as of `layout_seconds`.
    """

    equal: ShareAxis
    unequal: ShareAxis
    even: Plan
    plan: Plan
    seconds: float


def _with_shares(plan: Plan, axis: ShareAxis, batch_size: int) -> Plan:
    """`plan` with the shares of an axis, in samples of the batch."""
    assert axis.mesh is not None, "shares"
    each = batch_size // sum(axis.mesh.shares)
    shares = {axis.mesh.axis_names[axis.axis]: tuple(n * each for n in axis.mesh.shares)}
    if not axis.layout or plan.stages is None:
        return dataclasses.replace(plan, shares=shares)
    layouts, at = [*plan.stages.layouts], axis.layout - 1
    layouts[at] = dataclasses.replace(layouts[at], shares=shares)
    stages = dataclasses.replace(plan.stages, layouts=tuple(layouts))
    return dataclasses.replace(plan, stages=stages)


def _best_along(
    step: StepPricer,
    plan: Plan,
    cluster: Cluster,
    axis: ShareAxis,
    batch_size: int,
    memory_limit: float,
) -> _Shares | None:
    """The best shares along one axis, if its layout is faster with them."""
    even = price_along(step, plan, cluster, axis)
    least = (1 - MIN_SAVING) * _slowest_seconds(even, axis)
    best = None
    for tried, along in _tried(step, plan, cluster, axis, even, batch_size):
        found, seconds = _combined(along), _slowest_seconds(along, axis)
        if seconds < least and found.fits(memory_limit):
            best = _Shares(axis, tried, _combined(even), found, seconds)
            least = seconds
    return best


def _combined(along: Sequence[ViewedPlan]) -> Plan:
    return combine_slowest([one.plan for one in along])


def _slowest_seconds(along: Sequence[ViewedPlan], axis: ShareAxis) -> float:
    return max(layout_seconds(one.plan, axis.layout) for one in along)


def _tried(
    step: StepPricer,
    plan: Plan,
    cluster: Cluster,
    axis: ShareAxis,
    even: Sequence[ViewedPlan],
    batch_size: int,
) -> Iterator[tuple[ShareAxis, list[ViewedPlan]]]:
    """Shares along `axis`, and what each coordinate takes with them.

    The first are as the speeds of coordinates, the next follow from what those before gave.
    """
    for units in shared_units(plan.by_layout[axis.layout], batch_size, axis.axis):
        try:
            yield from _tried_in(units, step, plan, cluster, axis, even)
            return
        except UnevenSplitError:
            continue


def _tried_in(
    units: int,
    step: StepPricer,
    plan: Plan,
    cluster: Cluster,
    axis: ShareAxis,
    even: Sequence[ViewedPlan],
) -> Iterator[tuple[ShareAxis, list[ViewedPlan]]]:
    """The same of so many units each.

    Raises:
        UnevenSplitError: the step does not split so.
    """
    equal, mesh = units / len(even), plan.by_layout[axis.layout].mesh
    seconds = [layout_seconds(one.plan, axis.layout) for one in even]
    points = [(equal, taken) for taken in seconds]
    if len(plan.by_layout) == 1:  # less what does not depend on shares
        seconds = [sum(cost_of(one.plan).compute_s) for one in even]
    lines = [LinearTimeModel(0.0, taken / equal) for taken in seconds]
    known = set()
    for _ in range(_ROUNDS):
        shares = balance_units(lines, units)
        if shares in known or len(set(shares)) == 1:
            return
        known.add(shares)
        tried = axis._replace(mesh=UnevenMesh.over(mesh, axis.axis, shares))
        along = price_along(step, plan, cluster, tried)
        yield tried, along
        seconds = [layout_seconds(one.plan, axis.layout) for one in along]
        before, points = points, [*zip(map(float, shares), seconds, strict=True)]
        lines = [
            line if one[0] == other[0] else LinearTimeModel.through(one, other)
            for line, one, other in zip(lines, before, points, strict=True)
        ]


class LinearTimeModel(NamedTuple):
    """The seconds of a step by how many samples a rank has of it."""

    fixed: float
    each: float

    def seconds(self, samples: float) -> float:
        return self.fixed + self.each * samples

    @classmethod
    def through(cls, one: tuple[float, float], other: tuple[float, float]) -> LinearTimeModel:
        """Two points (samples, seconds)."""
        each = max((other[1] - one[1]) / (other[0] - one[0]), 1e-3 * one[1] / one[0])
        return cls(one[1] - each * one[0], each)


def balance_units(lines: Sequence[LinearTimeModel], units: int) -> tuple[int, ...]:
    """Share out `units`, at least one for each line, so that the longest takes least; of equal ones
    the first gets more."""
    shares = [1] * len(lines)
    # One more goes where it takes least: none could have gone to another and ended sooner.
    waiting = [(line.seconds(2), i) for i, line in enumerate(lines)]
    heapq.heapify(waiting)
    for _ in range(units - len(lines)):
        _, i = waiting[0]
        shares[i] += 1
        heapq.heapreplace(waiting, (lines[i].seconds(shares[i] + 1), i))
    return tuple(shares)
