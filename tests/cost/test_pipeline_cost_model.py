"""What a rank of a pipeline waits for, part by part."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planning.inter_op.stages.steps import Staged, machines
from tfpar.cost.cost import Cost
from tfpar.cost.pipeline_cost_model import PipelineCostModel, bottleneck_cost, split_idle_time
from tfpar.pipeline import generate

SCHEDULE = generate("1f1b", 2, 4)


def explained(prices: PipelineCostModel) -> Cost:
    cost = bottleneck_cost(prices, SCHEDULE, prices.run(SCHEDULE))
    found = split_idle_time(cost, prices, SCHEDULE)
    parts = (*found.compute_s, *found.communication_s, found.exposed_s, found.transfer_s)
    assert sum(parts) + found.bubble_s + prices.step_s == pytest.approx(cost.seconds)
    assert min(*parts, found.bubble_s) >= 0
    return found


@pytest.fixture
def prices() -> PipelineCostModel:
    return Staged.of("gpt", 2).priced(4, cluster=machines(within=1e7))


def summing(prices: PipelineCostModel, seconds: float) -> PipelineCostModel:
    """As if sums of gradients took so long."""
    stages = tuple(
        dataclasses.replace(one, cost=dataclasses.replace(one.cost, reduction_s=seconds))
        for one in prices.stages
    )
    return dataclasses.replace(prices, stages=stages)


def test_links_without_end_leave_only_the_bubble(prices):
    slow = explained(summing(prices, 0.0))
    quick = Staged.of("gpt", 2).priced(4, cluster=machines(within=1e18))
    quick = summing(dataclasses.replace(quick, stages=prices.stages), 0.0)
    fast = explained(quick)
    assert slow.transfer_s > 0 and slow.exposed_s == fast.exposed_s == 0
    latencies = 20 * 1e-7
    assert slow.transfer_s > 100 * latencies > 100 * fast.transfer_s / 20
    assert slow.seconds - fast.seconds == pytest.approx(slow.transfer_s, abs=latencies)
    assert slow.bubble_s == pytest.approx(fast.bubble_s, abs=latencies)


def test_sums_of_gradients_are_what_the_step_is_longer_by(prices):
    without, with_sums = explained(summing(prices, 0.0)), explained(summing(prices, 0.5))
    assert with_sums.exposed_s == pytest.approx(with_sums.seconds - without.seconds)
    assert 0 < with_sums.exposed_s <= 0.5 * (1 + 1e-9)
    assert with_sums.transfer_s == pytest.approx(without.transfer_s)
