"""Idle time of a rank of a pipeline by its cause: gradients, transfers, other stages."""

from __future__ import annotations

import dataclasses

from tfpar.cost.cost import Cost
from tfpar.cost.pipeline_cost_model import PipelineCostModel
from tfpar.cost.simulator import simulate
from tfpar.pipeline.graph import RECEIVE_AHEAD
from tfpar.pipeline.schedule import Schedule


def split_idle_time(cost: Cost, prices: PipelineCostModel, schedule: Schedule) -> Cost:
    """Split the idle time of `cost` by what would end it, found by simulating the step without.

    `exposed_s` is what the step is shorter by if sums of gradients take no time, `transfer_s` what
    it is then shorter by if nothing that is sent does, and `bubble_s` the rest.

    Args:
        cost: of a step in stages, as of `bottleneck_cost`.
        prices: of its stages.
    """
    tasks = prices.tasks(schedule)
    summed = [dataclasses.replace(stage.cost, reduction_s=0) for stage in prices.stages]
    without_sums = simulate(tasks, summed, prices.network, RECEIVE_AHEAD).seconds
    without_both = simulate(tasks, summed, None, RECEIVE_AHEAD).seconds
    idle = cost.exposed_s + cost.transfer_s + cost.bubble_s
    exposed = _within(cost.seconds - prices.step_s - without_sums, idle)
    transfer = _within(without_sums - without_both, idle - exposed)
    return dataclasses.replace(
        cost, exposed_s=exposed, transfer_s=transfer, bubble_s=idle - exposed - transfer
    )


def _within(seconds: float, most: float) -> float:
    return min(max(0.0, seconds), max(0.0, most))
