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
from tfpar.pipeline.pipeline import groups_of
from tfpar.planning.candidates import Order
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

    def parts(self, order: Order) -> list[Cluster]:
        """Return the subcluster of each actor."""
        return [self.cluster.part(group) for group in groups_of([self.size] * self.actors, order)]


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
        parts, size, micro = slots.parts(order), slots.size, self.microbatches
        paces = [self.seconds(part) for part in parts]
        each = balanced_seconds(1.0, paces) / (size * micro)
        sent = [0.0]
        cluster = slots.cluster.part(order) if order else slots.cluster
        for actor in range(slots.actors - 1):
            pairs = [(actor * size + i, (actor + 1) * size + i) for i in range(size)]
            sent.append(transfer_seconds(pairs, self.sent_bytes / micro, cluster))
        summed = 0.0
        if size > 1:
            mesh, shares = Mesh.of([size]), [1 / pace for pace in paces]
            for part, share in zip(parts, shares, strict=True):
                own = self.weight_bytes * share / sum(shares)
                summed = max(summed, collective_seconds("all_reduce", (0,), own, mesh, part))
        slowest = max(each, *sent)
        return pipeline_seconds(micro, slowest, slots.actors * each, 2 * sum(sent)) + summed


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
    if not any(counts):
        yield ()
    for kind, count in enumerate(counts):
        if count:
            rest = (*counts[:kind], count - 1, *counts[kind + 1 :])
            yield from ((kind, *others) for others in _sequences(rest))
