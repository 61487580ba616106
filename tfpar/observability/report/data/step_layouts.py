"""`StepLayouts`: a step in each layout of its stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.plans import Plan
from tfpar.propagation.partitioned_graph import PartitionedGraph


@dataclasses.dataclass(frozen=True, eq=False)
class StepLayouts:
    """Layouts of a step, as far as they are known: that of the plan first.

    Attributes:
        partitioned: the step in each of them.
    """

    plan: Plan
    partitioned: Sequence[PartitionedGraph]

    @classmethod
    def of(cls, plan: Plan, partitioned: PartitionedGraph) -> StepLayouts:
        """Return the layouts of a plan, of which the first is given.

        The others count if all of them are of the same graph.
        """
        layouts = () if plan.stages is None else plan.stages.layouts
        known = [one.partitioned for one in layouts if one.partitioned is not None]
        others = [one for one in known if one.graph is partitioned.graph]
        return cls(plan, [partitioned, *(others if len(others) == len(layouts) else ())])

    def number_of(self, stage: int | None) -> int:
        """Return the number of a stage's layout; 0 of a step without stages."""
        stages = self.plan.stages
        if stage is None or stages is None or not stages.layout_of:
            return 0
        number = stages.layout_of[stages.schedule.actors[stage]]
        return number if number < len(self.partitioned) else 0

    def of_stage(self, stage: int | None) -> PartitionedGraph:
        """Return the step in the layout of a stage."""
        return self.partitioned[self.number_of(stage)]

    def plan_of(self, stage: int | None) -> Plan:
        """Return the plan of the whole step in the layout of a stage, on its machines."""
        plan, stages = self.plan, self.plan.stages
        if stage is None or stages is None:
            return plan
        actor, machines = stages.schedule.actors[stage], plan.cluster
        if machines is not None:
            machines = machines.part(stages.groups(plan.mesh.size)[actor])
        return dataclasses.replace(plan.in_layout(plan.layout_of(actor)), cluster=machines)

    def first_actor(self, number: int) -> int:
        """Return the first actor with a layout."""
        assert self.plan.stages is not None, "a step with several layouts"
        return self.plan.stages.layout_of.index(number)
