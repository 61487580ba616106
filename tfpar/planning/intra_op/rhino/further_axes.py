"""Least seconds that a further mesh axis adds to a step that is divided among the ranks along it.

An op whose work is W takes W f g where axes leave the parts f >= 1/n and g >= 1/m of it. Of n m
ranks none takes less than if the second axis divided all, and what that leaves:

    W f g >= W f / m + (W g / n - W / (n m))        as (f - 1/n) (g - 1/m) >= 0

The first term is what the axes before count (`relaxed_costs`), the bracket what this one adds. The
same holds of sums over operands, each with its own f and g: the bytes that an op moves. It does not
of all that is priced, so that nothing is added

- by ops that hold others, or are written as several when they are split;
- by ops that are split, where their parts are uneven or slower than the whole (`half_size`,
  `entries_per_s`).

Collectives along this axis add what one over several axes takes longer than one over those before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfpar.cluster.description import Cluster
from tfpar.cost.collectives import collective_seconds, lines
from tfpar.cost.op_compute import flops, rate_of
from tfpar.cost.terms import Terms
from tfpar.ir.graph import Op
from tfpar.ir.roles import Roles, When
from tfpar.ir.traits import ON_HOST
from tfpar.planning.intra_op.rhino.axis_strategy import AxisStrategy
from tfpar.planning.intra_op.rhino.relaxed_costs import RelaxedCosts, RelaxedPricer
from tfpar.propagation.factors import size_after
from tfpar.propagation.reshard import Communication
from tfpar.spec import Mesh, Replicate

_LARGE = 2.0**40
"""Bytes of a collective whose start is nothing."""


class _AddedPricer(RelaxedPricer):
    """A pricer of work without starts, and of what collectives along one axis add.

    Args:
        axis: that one.
    """

    def __init__(self, mesh: Mesh, cluster: Cluster, roles: Roles, axis: int) -> None:
        decided = mesh.shape[axis]
        work_alone = cluster.with_device(launch_s=0.0, ramp_s=0.0)
        super().__init__(mesh, work_alone, roles, decided, mesh.size // decided)
        self.linked, self.axis = cluster, axis
        self._parts_added: dict[str, float] = {}

    def cut_seconds(self, moved: Communication) -> float:
        return 0.0  # a collective along the axes before may cut it

    def add_collective(self, terms: Terms, moved: Communication, *args: Any, **more: Any) -> None:
        if moved.when(self.roles) is not When.BETWEEN:
            moved = moved._replace(num_bytes=int(moved.num_bytes * self.part_added(moved.kind)))
        super().add_collective(terms, moved, *args, **more)

    def startup_seconds(self, kind: str, axes: tuple[int, ...]) -> float:
        return self.part_added(kind) * super().startup_seconds(kind, axes)

    def waited_seconds(
        self, kind: str, axes: tuple[int, ...], num_bytes: float, packable: bool
    ) -> float:
        return self.part_added(kind) * super().waited_seconds(kind, axes, num_bytes, packable)

    def part_added(self, kind: str) -> float:
        """The part of its price that a collective along the axis adds at least to one along axes
        before, of whatever size."""
        if kind not in self._parts_added:
            self._parts_added[kind] = self._least_part_added(kind)
        return self._parts_added[kind]

    def _least_part_added(self, kind: str) -> float:
        before = [axis for axis in range(self.axis) if self.mesh.shape[axis] > 1]
        some = [
            axes
            for count in range(1, len(before) + 1)
            for axes in itertools.combinations(before, count)
        ]
        return min((self._part_added_to(kind, axes) for axes in some), default=1.0)

    def _part_added_to(self, kind: str, before: tuple[int, ...]) -> float:
        def seconds(axes: tuple[int, ...], num_bytes: float) -> float:
            part = num_bytes * self.mesh.group_size(axes) / self.mesh.group_size(every)
            return collective_seconds(kind, axes, part, self.mesh, self.linked)

        every = (*before, self.axis)
        groups = (every, (self.axis,), *((axis,) for axis in before))
        sizes = {0.0, _LARGE}
        for axes in groups:
            share = self.mesh.group_size(axes) / self.mesh.group_size(every)
            for one, other in itertools.combinations(lines(kind, axes, self.mesh, self.linked), 2):
                if one[1] != other[1]:
                    sizes.add((one[0] - other[0]) / (other[1] - one[1]) / share)
        parts = [1.0]
        for size in sizes:
            alone = seconds((self.axis,), size)
            if size >= 0.0 and alone:
                others = sum(seconds((axis,), size) for axis in before)
                parts.append((seconds(every, size) - others) / alone)
        return max(0.0, min(parts))


class AddedCosts(RelaxedCosts):
    """See the module."""

    def _make_pricer(self, mesh: Mesh) -> RelaxedPricer:
        space = self.space
        return _AddedPricer(mesh, space.problem.cluster, space.model.roles, space.axis)

    def _add_left_alone(self, terms: Terms, op: Op, strategy: AxisStrategy) -> None:
        pass  # nothing is added by it; see the module

    def _strategy_terms(
        self, ops: Sequence[Op], strategies: Sequence[AxisStrategy]
    ) -> tuple[list[Terms], np.ndarray]:
        terms, seconds = super()._strategy_terms(ops, strategies)
        whole = next((at for at, one in enumerate(strategies) if self._is_whole(one)), None)
        if whole is None or not np.isfinite(seconds[whole]):
            for some in terms:
                some.compute[:] = 0.0
            return terms, np.where(np.isfinite(seconds), 0.0, seconds)
        least, least_s = terms[whole].compute / self.space.parts, seconds[whole] / self.space.parts
        for some, strategy in zip(terms, strategies, strict=True):
            counts = all(self._adds(op, strategy) for op in ops)
            some.compute[:] = np.maximum(some.compute - least, 0.0) if counts else 0.0
        return terms, np.maximum(seconds - least_s, 0.0)

    @staticmethod
    def _is_whole(strategy: AxisStrategy) -> bool:
        placed = (*strategy.needs, *strategy.made)
        return strategy.axis_split.split[0] < 0 and all(isinstance(p, Replicate) for p in placed)

    def _adds(self, op: Op, strategy: AxisStrategy) -> bool:
        """Whether what is left of the work of `op` counts; see the module."""
        space, factor = self.space, strategy.axis_split.split[0]
        if op in space.variables or op in space.fed:
            return self._is_whole(strategy)
        if op in space.left_alone or op not in space.growth.axis_splits or ON_HOST in op.attrs:
            return False
        rule, device = space.prepared.rules[op], space.problem.cluster.device
        if rule.expand:
            return False
        if factor < 0:
            return True
        if rate_of(op.type, device.entries_per_s) is not None:
            return False
        if device.half_size and flops(op, rule):
            return False
        size, pattern = rule.sizes[factor], strategy.axis_split.split[1]
        return size_after(size, pattern, space.parts) * space.parts == size
