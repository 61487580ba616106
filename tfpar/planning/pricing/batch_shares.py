"""Unequal shares of the batch for ranks of unequal speed, once the plan is found.

Ranks wait for each other where they sum gradients, so the slowest one's time counts. Each
coordinate of a mesh axis that splits the batch is priced at the rates of its own devices, with its
own share; the shares are those that let all take about as long. In a pipeline a coordinate is one
rank of each stage, from the first to the last: each of them has the same share.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tfpar.cluster.description import Cluster
from tfpar.planning.pricing.price import (
    StepPricer,
    actor_clusters,
    combine_slowest,
    cost_of,
    price_along,
    ranks_along,
    seconds_of,
)
from tfpar.plans import Plan
from tfpar.propagation.uneven_batch import UnevenSplitError
from tfpar.spec import UnevenMesh

MIN_SAVING = 0.02
"""The part of a step that shares have to save. As with chunks (`planning.pricing.chunks`), one plan
is compared with itself."""

_ROUNDS = 4
"""Number of times that shares are set by the times under the last ones: samples take about as long
each, beside what does not depend on them (the update, the start of ops), so few are needed."""


def uneven_axes(plan: Plan, cluster: Cluster) -> list[int]:
    """Return the axes that split the batch of `plan` along which devices of `cluster` differ, be it
    in one stage."""
    if cluster.one_memory:
        return []
    mesh, parts = plan.mesh, actor_clusters(plan, cluster)
    return [
        axis
        for axis in map(mesh.axis, plan.batch_axes)
        if any(
            len({part.at_pace_of(ranks).device for ranks in ranks_along(mesh, axis)}) > 1
            for part in parts
        )
    ]


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
    best = plan
    for axis in uneven_axes(plan, cluster):
        even = price_along(step, plan, cluster, axis)
        least = (1 - MIN_SAVING) * seconds_of(combine_slowest(even))
        if best.shares:
            least = min(least, seconds_of(best))
        for mesh, along in _tried(step, plan, cluster, axis, even, batch_size):
            found = combine_slowest(along)
            if seconds_of(found) < least and found.fits(memory_limit):
                each = batch_size // sum(mesh.shares)
                shares = {mesh.axis_names[axis]: tuple(n * each for n in mesh.shares)}
                best = dataclasses.replace(found, shares=shares).with_findings(passed_over=None)
                least = seconds_of(best)
    return best


def _tried(
    step: StepPricer,
    plan: Plan,
    cluster: Cluster,
    axis: int,
    even: Sequence[Plan],
    batch_size: int,
) -> Iterator[tuple[UnevenMesh, list[Plan]]]:
    """Shares along `axis`, and what each coordinate takes with them.

    The first are as the speeds of coordinates, the next follow from what those before gave.
    """
    for units in plan.shared_units(batch_size, axis):
        try:
            yield from _tried_in(units, step, plan, cluster, axis, even)
            return
        except UnevenSplitError:
            continue


def _tried_in(
    units: int, step: StepPricer, plan: Plan, cluster: Cluster, axis: int, even: Sequence[Plan]
) -> Iterator[tuple[UnevenMesh, list[Plan]]]:
    """The same of so many units each.

    Raises:
        UnevenSplitError: the step does not split so.
    """
    equal = units / len(even)
    points = [(equal, seconds_of(found)) for found in even]
    lines = [LinearTimeModel(0.0, sum(cost_of(found).compute_s) / equal) for found in even]
    known = set()
    for _ in range(_ROUNDS):
        shares = balance_units(lines, units)
        if shares in known or len(set(shares)) == 1:
            return
        known.add(shares)
        mesh = UnevenMesh.over(plan.mesh, axis, shares)
        along = price_along(step, plan, cluster, axis, mesh)
        yield mesh, along
        before, points = points, [(n, seconds_of(f)) for n, f in zip(shares, along, strict=True)]
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
