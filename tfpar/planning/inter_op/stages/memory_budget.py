"""Linear memory budget of stages, for assigning units when the fastest assignment does not fit.

The model is calibrated on an assignment that has been priced. The bytes of a rank of actor a are
linear in its units:

    held_a = sum over the stages s of actor a, over the units i in s,
                 w weights_i + in_flight_s k kept_i  + what else was held

w scales weights to persistent bytes (with gradients and slots), k the saved activations to one
microbatch; both are the average over all ranks of the priced assignment, and the constant makes
the sum exact for it. It is an estimate, not a bound: an assignment within the budget must still be
priced, and may be infeasible; but stages that hold too much get less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from tfpar.cost.pipeline_cost import PipelineCost
from tfpar.ir.graph import Op
from tfpar.planning.inter_op.stages.units import Unit, UnitGraph
from tfpar.spec import PlanError

SLACK = 1e-6
"""By how much, relatively, a sum of bytes may be above its limit: what solvers miss it by."""


class InfeasibleAssignment(PlanError):
    """There are units for each stage, but none that its devices have room for."""


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """Bytes that the ranks of each stage can hold of units.

    Attributes:
        actors: that run each stage.
        limits: bytes that a rank of each actor may hold for units.
        per_weight: bytes that it holds for one of a unit's weights.
        per_kept: of each stage, bytes for one of what a unit keeps.
    """

    actors: Sequence[int]
    limits: Sequence[float]
    per_weight: float
    per_kept: Sequence[float]

    def of_unit(self, unit: Unit, stage: int) -> float:
        """Return the bytes that a rank of `stage` holds for `unit`."""
        return unit.weight_bytes * self.per_weight + unit.kept_bytes * self.per_kept[stage]

    def held(self, graph: UnitGraph, stages: Sequence[int]) -> list[float]:
        """Return the bytes that a rank of each actor holds for its units."""
        found = [0.0] * len(self.limits)
        for unit, stage in zip(graph.units, stages, strict=True):
            found[self.actors[stage]] += self.of_unit(unit, stage)
        return found

    def limit(self, stage: int) -> float:
        """Return the bytes that a rank may hold for the units of a stage, if it has no others."""
        return self.limits[self.actors[stage]] * (1 + SLACK)

    def too_small(self, graph: UnitGraph) -> bool:
        """Whether nothing fits, however the model is cut: units need more than there is of all
        actors together, each in the stage where it needs least."""
        stages = range(len(self.actors))
        least = sum(min(self.of_unit(unit, stage) for stage in stages) for unit in graph.units)
        return min(self.limits) <= 0 or least > sum(self.limits) * (1 + SLACK)

    def have_room(self, graph: UnitGraph, stages: Sequence[int]) -> bool:
        """Whether all fits, with units in these stages."""
        held = zip(self.held(graph, stages), self.limits, strict=True)
        return all(own <= limit * (1 + SLACK) for own, limit in held)


@dataclasses.dataclass(frozen=True)
class PricedAssignment:
    """Ops in stages that were priced.

    Attributes:
        stages: of ops.
        actors: that run each stage.
        cost: what each takes and holds.
    """

    stages: Mapping[Op, int]
    actors: Sequence[int]
    cost: PipelineCost

    def rooms(self, graph: UnitGraph, unit_of: Mapping[Op, int]) -> MemoryBudget:
        """Return the memory budget that its stages leave for the units of `graph`."""
        before: dict[int, int] = {}
        for op, unit in unit_of.items():
            if op in self.stages:
                before.setdefault(unit, self.stages[op])
        stages = [before.get(i, 0) for i in range(len(graph.units))]
        shares = self.cost.stages
        fixed = sum(share.fixed_bytes for share in shares)
        kept = sum(share.kept_bytes for share in shares)
        per_weight = _ratio(fixed, sum(unit.weight_bytes for unit in graph.units))
        per_kept = _ratio(kept, sum(unit.kept_bytes for unit in graph.units))
        rooms = MemoryBudget(
            self.actors,
            [math.inf] * (max(self.actors) + 1),
            per_weight,
            [per_kept * share.in_flight for share in shares],
        )
        held = rooms.held(graph, stages)
        limits = list(rooms.limits)
        for actor, share in zip(self.actors, shares, strict=True):
            limits[actor] = held[actor] - share.excess_bytes
        return dataclasses.replace(rooms, limits=limits)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
