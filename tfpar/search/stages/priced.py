"""What a plan with stages costs."""

from __future__ import annotations

from collections.abc import Mapping

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.cost.staged import StagedCost
from tfpar.cost.staged_prices import StagedPrices, cost_of_stages, staged_cost
from tfpar.cost.step_in_stages import StepInStages
from tfpar.ir.graph import Op
from tfpar.pipeline.schedule import Schedule
from tfpar.search.parts import StepInParts


def priced_in_stages(
    step: StepInParts,
    stage: Mapping[Op, int],
    schedule: Schedule,
    cluster: Cluster,
    recompute: bool = False,
) -> tuple[Cost, StagedCost]:
    """What a step under a plan costs in stages: as plans compare it, and stage by stage.

    Args:
        step: on the mesh of one stage.
        stage: of every op of the step, as `pipeline.step_stages` gives it.
        cluster: the ranks of all stages: a mesh of them for each line of the schedule, in order.
        recompute: the backward pass of a stage runs its forward pass again.

    Raises:
        ScheduleError: the schedule is for other stages, or its tasks wait for each other.
        TfparError: the cluster has fewer ranks.
    """
    cut = step.cut(schedule.num_microbatches)
    staged = StepInStages(cut, step.roles, stage, schedule.num_stages, step.problem.state_ratio)
    prices = StagedPrices.of(staged, schedule.actors, cluster, recompute)
    timeline = prices.run(schedule)
    return cost_of_stages(prices, schedule, timeline), staged_cost(prices, schedule, timeline)
