"""What a rank of a pipeline waits for, part by part."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planning.inter_op.stages.steps import Staged, machines
from tfpar.cost.cost import Cost
from tfpar.cost.host import waiting_for_host
from tfpar.cost.pipeline_cost_model import PipelineCostModel, bottleneck_cost, split_idle_time
from tfpar.pipeline import generate

SCHEDULE = generate("1f1b", 2, 4)


def explained(prices: PipelineCostModel) -> Cost:
    cost = bottleneck_cost(prices, SCHEDULE, prices.run(SCHEDULE))
    found = split_idle_time(cost, prices, SCHEDULE)
    parts = (*found.compute_s, *found.communication_s, found.exposed_s, found.transfer_s)
    told = sum(parts) + found.host_wait_s + found.bubble_s + prices.step_s
    assert told == pytest.approx(cost.seconds)
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


def test_tasks_take_as_long_as_their_ops_take_to_be_issued(prices):
    slow = Staged.of("gpt", 2).priced(4, cluster=machines(within=1e7).with_device(dispatch_s=1.0))
    cost, plain = explained(slow), explained(prices)
    assert plain.host_wait_s == 0 and cost.compute_s == plain.compute_s
    for stage, bare in zip(slow.stages, prices.stages, strict=True):
        for kind in "FIWU":
            ops = stage.dispatch_s[kind]
            running = bare.cost.seconds[kind]
            taken = running + waiting_for_host(ops, running)
            assert stage.cost.seconds[kind] == pytest.approx(taken)
            assert ops == round(ops), "a second each"
    working = [sum(stage.dispatch_s[kind] for kind in "FIW") for stage in slow.stages]
    assert cost.host_wait_s > 0.9 * 4 * max(working)
