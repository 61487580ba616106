"""The order in which actors take machines, where machines differ (auto3d, §4.1: placement).

Actors take the machines of a cluster in an order of their types; equal machines follow each other
as their ranks do. What a step takes in another is estimated by equation 4 (`cost.closed_form`),
from what is known of the plan for the given order: the work is taken to be shared out by pace, and
with it the weights whose gradients are summed. The few that are estimated to be fastest are planned
and priced in full.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from tfpar.cluster.description import Cluster
from tfpar.cluster.network import likeness
from tfpar.cost.closed_form import pipeline_seconds
from tfpar.cost.collectives import collective_seconds, transfer_seconds
from tfpar.cost.stage_transfers import pair_ranks
from tfpar.pipeline.pipeline import groups_of
from tfpar.planning.candidates import Groups, Order
from tfpar.planning.inter_op.stages.slowdowns import balanced_seconds
from tfpar.spec import Mesh

PLANNED = 2
"""Number of orders that are planned in full, beside the given one."""

MOST_ORDERS = 500
"""Largest number of orders that are estimated. Where there are more, machines of a type stay
together."""


@dataclasses.dataclass(frozen=True)
class ActorSlots:
    """The actors among which machines are shared out.

    Attributes:
        cluster: of all ranks.
        size: ranks of each actor.
        actors: number of actors.
    """

    cluster: Cluster
    size: int
    actors: int

    def orders(self) -> list[Order]:
        """List the orders that can make a difference, but the given one; none if all machines are
        equal."""
        rows: dict[int, list[int]] = {}
        for rank, machine in enumerate(self.cluster.machines[: self.size * self.actors]):
            rows.setdefault(machine, []).append(rank)
        kinds: dict[object, list[list[int]]] = {}
        for row in rows.values():
            kinds.setdefault((len(row), likeness(self.cluster.part(row))), []).append(row)
        found = (self._order(kinds, order) for order in _kind_orders([*map(len, kinds.values())]))
        given = tuple(range(self.size * self.actors))
        return [order for order in dict.fromkeys(found) if order != given]

    def _order(self, kinds: dict[object, list[list[int]]], order: Sequence[int]) -> Order:
        left = [iter(rows) for rows in kinds.values()]
        ranks = [rank for kind in order for rank in next(left[kind])]
        groups = groups_of([self.size] * self.actors, ranks)
        return tuple(rank for group in groups for rank in sorted(group))


@dataclasses.dataclass(frozen=True)
class PlacementWorkload:
    """Workload of a step by which the machines of its stages are chosen.

    Attributes:
        seconds: of all forward and backward passes on one device of a part of the cluster.
        weight_bytes: of all weights.
        sent_bytes: that a rank sends to each neighbouring set in a step.
        microbatches: that a step has.
    """

    seconds: Callable[[Cluster], float]
    weight_bytes: float
    sent_bytes: float
    microbatches: int

    def estimate(self, slots: ActorSlots, order: Order) -> float:
        """Estimate the seconds of a step whose stages are placed so."""
        groups = groups_of([slots.size] * slots.actors, order)
        return self.estimate_groups(slots.cluster, groups, slots.size)

    def estimate_groups(
        self, cluster: Cluster, groups: Sequence[Sequence[int]], size: float
    ) -> float:
        """Estimate the seconds of a step whose actors have these ranks, which share what is sent.

        Args:
            size: ranks of an actor in the plan that `sent_bytes` is of.
        """
        parts = [cluster.part(group) for group in groups]
        shared = [size / len(group) for group in groups]
        paces = [self.seconds(p) * each for p, each in zip(parts, shared, strict=True)]
        each = balanced_seconds(1.0, paces) / (size * self.microbatches)
        sent = [0.0]
        for one, other in itertools.pairwise(groups):
            pairs = pair_ranks(one, other)
            num_bytes = self.sent_bytes * (size / len(pairs)) / self.microbatches
            sent.append(transfer_seconds(pairs, num_bytes, cluster))
        summed, shares = 0.0, [1 / pace for pace in paces]
        for group, part, share in zip(groups, parts, shares, strict=True):
            if len(group) > 1:
                own, mesh = self.weight_bytes * share / sum(shares), Mesh.of([len(group)])
                summed = max(summed, collective_seconds("all_reduce", (0,), own, mesh, part))
        slowest = max(each, *sent)
        filled = pipeline_seconds(self.microbatches, slowest, len(groups) * each, 2 * sum(sent))
        return filled + summed


def fastest_orders(
    slots: ActorSlots, workload: PlacementWorkload, is_given_priced: bool
) -> list[Order]:
    """Return the few orders that are estimated to be fastest, and faster than the given one if that
    has a price to be compared with."""
    orders = slots.orders()
    if not orders:
        return []
    limit = workload.estimate(slots, ()) if is_given_priced else math.inf
    estimates = sorted((workload.estimate(slots, order), order) for order in orders)
    return [order for seconds, order in estimates[:PLANNED] if seconds < limit]


MOST_MACHINES = 10
"""Largest number of machines that are shared out among actors in every way; where there are more,
machines of a type stay together."""


def fastest_groups(
    cluster: Cluster, size: float, workload: PlacementWorkload, given: Groups
) -> list[Groups]:
    """Return the few ways, fastest first, that are estimated to be the best of those in which
    actors have unlike numbers of ranks: all of some machines each.

    There are none where machines are equal: sharing them out equally is as good.

    Args:
        size: ranks of an actor in the plan that the workload's `sent_bytes` is of.
        given: the ranks of its actors. Other ways have to be estimated to be faster: what the
            estimate leaves out, such as collectives within stages, it leaves out of both.
    """
    rows: dict[int, list[int]] = {}
    for rank, machine in enumerate(cluster.machines):
        rows.setdefault(machine, []).append(rank)
    kinds: dict[object, list[list[int]]] = {}
    for row in rows.values():
        kinds.setdefault((len(row), likeness(cluster.part(row))), []).append(row)
    if len(kinds) == 1:
        return []
    apart = len(rows) <= MOST_MACHINES
    counts = [len(own) if apart else 1 for own in kinds.values()]
    found = {given: workload.estimate_groups(cluster, given, size)}
    for order in _kind_orders(counts):
        left = [iter(own if apart else [sum(own, [])]) for own in kinds.values()]
        runs = [next(left[kind]) for kind in order]
        for groups in _shared_out(runs):
            if len({*map(len, groups)}) > 1 and groups not in found:
                found[groups] = workload.estimate_groups(cluster, groups, size)
    ranked = sorted(found, key=found.__getitem__)
    return ranked[: min(PLANNED, ranked.index(given))]


def _shared_out(runs: Sequence[Sequence[int]]) -> Iterator[Groups]:
    """Yield the ways in which runs of ranks, in their order, are shared out among several
    actors."""
    for count in range(1, len(runs)):
        for cuts in itertools.combinations(range(1, len(runs)), count):
            ends = itertools.pairwise((0, *cuts, len(runs)))
            yield tuple(tuple(sorted(itertools.chain.from_iterable(runs[a:b]))) for a, b in ends)


def _kind_orders(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Sequences with as many of each kind: all of them, or, where these are too many, those in
    which equal ones follow each other."""
    number = math.factorial(sum(counts))
    for count in counts:
        number //= math.factorial(count)
    if number <= MOST_ORDERS:
        yield from _sequences(tuple(counts))
        return
    few = itertools.islice(itertools.permutations(range(len(counts))), MOST_ORDERS)
    yield from (tuple(kind for kind in order for _ in range(counts[kind])) for order in few)


def _sequences(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All sequences with as many of each kind, in lexicographic order."""
    at = [kind for kind, count in enumerate(counts) for _ in range(count)]
    while True:
        yield tuple(at)
        rises = [i for i, (one, other) in enumerate(itertools.pairwise(at)) if one < other]
        if not rises:
            return
        last = rises[-1]
        larger = max(i for i in range(last + 1, len(at)) if at[i] > at[last])
        at[last], at[larger] = at[larger], at[last]
        at[last + 1 :] = at[:last:-1]
