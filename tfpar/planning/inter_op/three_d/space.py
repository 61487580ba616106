"""The strategies that a search chooses from (auto3d, §4.1 and §4.4).

A point says everything but the layers of the stages, which `pipe_dp` finds, the shares of copies
that are not equally fast, what is done to store less, and what is overlapped: slots are sharded
where a step then takes less or else does not fit, layers are computed again where nothing else
fits, gradients are summed during the backward pass where less of that is then waited for. Placement
is a tiling with dominoes: machines are rows of devices, and a stage is a domino of data x tensor of
them. As many equal machines as there are copies are a block, in which the dominoes lie or stand:

    2 data x 2 tensor, 2 machines of 4        lying    0 0 0 0    standing    0 0 1 1
                                                       1 1 1 1                0 0 1 1

Standing ones have copies in different machines and the pipeline within, lying ones the other way
round. Where no block comes out even, stages take ranks one after the other. Machines follow each
other in any order of their kinds, those of one kind in the order of their ranks: equal ones are not
told apart.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tfpar.cluster.description import Node
from tfpar.planning.inter_op.three_d.assign import (
    assign_layers,
    balance_microbatches,
    even_counts,
    overlap_gradient_sums,
    shards_slots_for_free,
)
from tfpar.planning.inter_op.three_d.cost_model import lower_bound_seconds
from tfpar.planning.inter_op.three_d.cost_table import LayerLayout
from tfpar.planning.inter_op.three_d.memory import fits
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.strategy import MemoryOptions, OverlapOptions, Strategy3D
from tfpar.spec import PlanError

Row = Sequence[int]
"""The ranks of a machine."""

VIRTUAL = (1, 2, 4, 8)
"""Stages of an actor. Each doubling halves the bubble, and doubles what is sent."""


class ParallelDegrees(NamedTuple):
    """A point without its placement; the number of stages follows."""

    data: int
    tensor: int
    microbatch: int
    virtual: int = 1
    experts: int = 1

    def on(self, devices: int) -> str:
        """Them and the number of stages, as text."""
        actors = devices // (self.data * self.tensor)
        return (
            f"{actors} stages x {self.data} data x {self.tensor} tensor, microbatches of "
            f"{self.microbatch}"
        )


class StrategyPoint(NamedTuple):
    """A strategy without the layers of its stages.

    Attributes:
        order: the kind of each machine, in the order in which stages take them.
        standing: of each block, whether its dominoes stand.
    """

    degrees: ParallelDegrees
    order: tuple[int, ...]
    standing: tuple[bool, ...]


class StrategySpace:
    """All points of a model on a cluster.

    Attributes:
        kinds: equal machines, by type.
        degrees: those for which the table has times on every device.

    Raises:
        PlanError: there are none.
    """

    def __init__(self, model: StrategyProblem) -> None:
        self.model = model
        self.kinds = _alike(model)
        can = model.table.can_recompute, model.table.can_shard_slots, model.can_offload_slots
        self._memories = [
            MemoryOptions(*options)
            for options in itertools.product(*((False, True)[: 1 + one] for one in can))
        ]
        self.degrees = list(_degrees(model))
        if not self.degrees:
            raise PlanError(
                f"No strategy: the table has no times whose tensor degree and microbatches divide "
                f"{model.cluster.size} devices and a batch of {model.batch}."
            )

    @property
    def plain_order(self) -> tuple[int, ...]:
        """Machines in the order of their ranks."""
        first = sorted(
            (row[0], kind) for kind, machines in enumerate(self.kinds) for row in machines
        )
        return tuple(kind for _, kind in first)

    @property
    def num_points(self) -> int:
        """Upper bound of the number of points."""
        counts = [len(machines) for machines in self.kinds]
        orders = math.factorial(sum(counts)) // math.prod(map(math.factorial, counts))
        return sum(orders * 2 ** (sum(counts) // d.data) for d in self.degrees)

    def points(self, degrees: ParallelDegrees) -> Iterator[StrategyPoint]:
        """Yield all points with these degrees."""
        for order in _orders([len(machines) for machines in self.kinds]):
            blocks = self._num_blocks(degrees, order)
            for standing in itertools.product((False, True), repeat=blocks):
                yield StrategyPoint(degrees, order, standing)

    def sample(
        self, rng: random.Random, degrees: ParallelDegrees, order: tuple[int, ...] | None = None
    ) -> StrategyPoint:
        """Draw a point with these degrees, and this order of machines if one is given."""
        if order is None:
            order = tuple(rng.sample(self.plain_order, len(self.plain_order)))
        blocks = self._num_blocks(degrees, order)
        return StrategyPoint(degrees, order, tuple(rng.random() < 0.5 for _ in range(blocks)))

    def lying(self, degrees: ParallelDegrees, order: tuple[int, ...]) -> StrategyPoint:
        """Return the point whose dominoes all lie: stages take ranks one after the other."""
        return StrategyPoint(degrees, order, (False,) * self._num_blocks(degrees, order))

    def strategy(self, point: StrategyPoint) -> Strategy3D | None:
        """Return the strategy of a point; see `bounded`."""
        found = self.bounded(point)
        return None if found is None else found[0]

    def bounded(self, point: StrategyPoint) -> tuple[Strategy3D, float] | None:
        """Assign layers to the stages of a point, as fast as it can be by equations 1 to 4, and
        return the seconds that it takes at least, too (`cost_model.lower_bound_seconds`): of
        several the one with the least. Where memory is short, each stage has what it needs of the
        options that make it store less.

        Returns:
            None if it needs more memory than there is.
        """
        strategy = even(self.model, point.degrees, self._ranks(point))
        memories = [m for m in self._memories if strategy.data > 1 or not m.shard_slots]
        light = [m for m in memories if not m.recompute and not m.offload_slots]
        of_light = [[*self._finished(strategy, [memory])] for memory in light]
        found = [*itertools.chain.from_iterable(of_light)]
        if not found:
            found += self._finished(strategy, memories)
            # One choice for all may suit machines of several kinds better, whose copies have shares
            # of their own, and virtual stages, whose bytes are added up.
            if strategy.virtual > 1 or (found and len(self.kinds) > 1):
                for memory in memories:
                    if memory.recompute and not memory.offload_slots:
                        found += self._finished(strategy, [memory])
        elif not of_light[0] and not shards_slots_for_free(self.model, strategy):
            found += self._finished(strategy, memories)
        each = [(one, lower_bound_seconds(self.model, one)) for one in found]
        return min(each, key=lambda pair: pair[1], default=None)

    def _finished(
        self, strategy: Strategy3D, memories: Sequence[MemoryOptions]
    ) -> Iterator[Strategy3D]:
        """With equal shares, and with others if they differ.

        Args:
            memories: that each stage chooses from.
        """
        found = assign_layers(self.model, strategy, memories)
        if found is not None:
            found = overlap_gradient_sums(self.model, found)
            yield found
            uneven = balance_microbatches(self.model, found)
            if uneven is not found and fits(self.model, uneven):
                yield uneven

    def _ranks(self, point: StrategyPoint) -> tuple[int, ...]:
        standing = iter(point.standing)
        found: list[int] = []
        for rows, either in self._blocks(point.degrees, point.order):
            if either and next(standing):
                tensor = point.degrees.tensor
                starts = range(0, len(rows[0]), tensor)
                rows = [row[first : first + tensor] for first in starts for row in rows]
            found.extend(itertools.chain.from_iterable(rows))
        return tuple(found)

    def _num_blocks(self, degrees: ParallelDegrees, order: tuple[int, ...]) -> int:
        return sum(either for _, either in self._blocks(degrees, order))

    def _blocks(
        self, degrees: ParallelDegrees, order: tuple[int, ...]
    ) -> Iterator[tuple[list[Row], bool]]:
        """Machines that follow each other, and whether dominoes may lie or stand in them."""
        left = [iter(machines) for machines in self.kinds]
        rows = [next(left[kind]) for kind in order]
        at = 0
        while at < len(rows):
            width = len(rows[at])
            block = rows[at : at + degrees.data]
            either = (
                1 < degrees.data == len(block)
                and len(set(order[at : at + degrees.data])) == 1
                and width % degrees.tensor == 0
                and width > degrees.tensor
            )
            yield (block, True) if either else ([rows[at]], False)
            at += degrees.data if either else 1


def even(
    model: StrategyProblem, degrees: ParallelDegrees, ranks: tuple[int, ...] = ()
) -> Strategy3D:
    """Return a strategy with as many layers in each stage as can be, and by default on ranks in
    their order.

    Transfers are overlapped where devices compute beside sending.
    """
    data, tensor, microbatch, virtual, experts = degrees
    stages = model.cluster.size // (data * tensor) * virtual
    counts = even_counts(len(model.table), stages)
    overlap = OverlapOptions(transfers=model.cluster.overlap > 0)
    return Strategy3D(
        data, tensor, microbatch, counts, ranks, virtual, experts=experts, overlap=overlap
    )


def _alike(model: StrategyProblem) -> list[list[Row]]:
    """The rows of machines that are equal and have as many ranks."""
    cluster = model.cluster
    rows: dict[int, list[int]] = {}
    for rank, machine in enumerate(cluster.machines):
        rows.setdefault(machine, []).append(rank)
    nodes = [dataclasses.replace(n, count=1) for n in cluster.nodes for _ in range(n.count)]
    found: dict[tuple[Node, int], list[Row]] = {}
    for machine, ranks in rows.items():
        found.setdefault((nodes[machine], len(ranks)), []).append(ranks)
    return list(found.values())


def _degrees(model: StrategyProblem) -> Iterator[ParallelDegrees]:
    table, size = model.table, model.cluster.size
    names = {device.name for device in model.cluster.devices}
    for tensor, microbatch in table.shapes:
        if size % tensor:
            continue
        for data in range(1, size // tensor + 1):
            stages, rest = divmod(size // tensor, data)
            microbatches, left = divmod(model.batch, data * microbatch)
            if rest or left:
                continue
            experts = [
                degree
                for degree in table.expert_degrees
                if data % degree == 0
                and table.has(names, LayerLayout(data, tensor, microbatch, degree))
            ]
            for virtual in VIRTUAL:
                if virtual > model.most_virtual:
                    break
                if virtual == 1 or 1 < stages <= microbatches:
                    if stages * virtual <= len(table):
                        for degree in experts:
                            yield ParallelDegrees(data, tensor, microbatch, virtual, degree)


def _orders(counts: list[int]) -> Iterator[tuple[int, ...]]:
    """All sequences with as many of each kind, in lexical order.

    A loop: clusters have more machines than calls can be nested.
    """
    order = [kind for kind, count in enumerate(counts) for _ in range(count)]
    last = len(order) - 1
    while True:
        yield tuple(order)
        at = next((i for i in range(last - 1, -1, -1) if order[i] < order[i + 1]), None)
        if at is None:
            return
        larger = next(i for i in range(last, at, -1) if order[i] > order[at])
        order[at], order[larger] = order[larger], order[at]
        order[at + 1 :] = reversed(order[at + 1 :])
