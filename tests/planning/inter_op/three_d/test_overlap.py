"""What is sent while ranks compute: what of it is waited for, worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planning.inter_op.three_d.random_models import mixed, some
from tests.planning.inter_op.three_d.tables import cluster, equal_layers
from tfpar.planning.inter_op.three_d.assign import overlap_gradient_sums
from tfpar.planning.inter_op.three_d.cost_model import analytic_seconds, simulate_strategy
from tfpar.planning.inter_op.three_d.evaluation import Evaluation, lower_bound
from tfpar.planning.inter_op.three_d.problem import StrategyProblem
from tfpar.planning.inter_op.three_d.searches import find
from tfpar.planning.inter_op.three_d.space import StrategySpace
from tfpar.planning.inter_op.three_d.strategy import MemoryOptions, OverlapOptions, Strategy3D

ALIKE = {"fast": 1.0}
PAIR = cluster(("fast", 1, 1.0, 10.0), ("fast", 1, 1.0, 10.0))
GRADIENTS = OverlapOptions(gradients=True)


def model(on=PAIR, layers=4, batch=8, **fields):
    return StrategyProblem(equal_layers(layers, ALIKE, **fields), on, batch)


@pytest.mark.parametrize(
    ("summing", "overlap", "exposed"),
    [
        # Sums of 3 s behind 2 s of backward pass a layer: the first begins as the first of four
        # layers is through, and all follow each other.
        (3, 1.0, 2 + 4 * 3 - 4 * 2),
        # Sums that are shorter: all but that of the layer which comes last.
        (1, 1.0, 1),
        # Behind 2 s of backward pass hides half a second.
        (3, 0.25, 0.5 + 4 * 3 - 4 * 0.5),
        (3, 0.0, 4 * 3),
    ],
)
def test_gradients_are_summed_behind_the_backward_pass(summing, overlap, exposed):
    on = dataclasses.replace(PAIR, overlap=overlap)
    found = Strategy3D(2, 1, 1, (4,), overlap=GRADIENTS)
    expected = pytest.approx(4 * 4 * 3 + exposed)
    assert simulate_strategy(model(on, gradient_bytes=10.0 * summing), found).seconds == expected
    # Equation 1 adds up both links of a ring of two.
    assert analytic_seconds(model(on, gradient_bytes=5.0 * summing), found) == expected


def test_what_is_computed_again_hides_sums_too():
    given = model(gradient_bytes=30.0, input_bytes=1.0)
    found = Strategy3D(2, 1, 1, (4,), overlap=GRADIENTS, memory=MemoryOptions(recompute=True))
    assert simulate_strategy(given, found).seconds == pytest.approx(4 * 4 * 4 + 3)


def test_what_tensor_ranks_exchange_hides_nothing():
    on = cluster(*[("fast", 2, 100.0, 10.0)] * 2)
    given = model(on, gradient_bytes=30.0, reduced_bytes=100.0)
    found = Strategy3D(2, 2, 1, (4,), overlap=GRADIENTS)
    # Two rings share the link between machines; a backward pass computes for 1 s.
    exposed = 1 + 4 * 15 / 5 - 4 * 1
    assert simulate_strategy(given, found).seconds == pytest.approx(4 * 4 * (1.5 + 2 * 1) + exposed)


def test_weights_of_sharded_slots_are_gathered_after_all():
    given = model(gradient_bytes=20.0, fixed_bytes=100.0, slot_bytes=60.0, weight_bytes=10.0)
    found = Strategy3D(2, 1, 1, (4,), overlap=GRADIENTS, memory=MemoryOptions(shard_slots=True))
    scattered, gathered = 20 / 2 / 10, 4 * 10 / 2 / 10
    assert simulate_strategy(given, found).seconds == pytest.approx(
        4 * 4 * 3 + scattered + gathered
    )


def test_gradients_are_not_overlapped_where_starting_a_sum_takes_longer():
    level = dataclasses.replace(PAIR.levels[0], latency_s=5.0)
    far = dataclasses.replace(PAIR, levels=(level,))
    plain = Strategy3D(2, 1, 1, (4,))
    for on, gradients in [(PAIR, True), (far, False)]:
        given = model(on, gradient_bytes=30.0)
        assert overlap_gradient_sums(given, plain).overlap.gradients == gradients
        assert find(given).best.strategy.overlap.gradients in (gradients, False)


def test_transfers_that_are_not_overlapped_keep_their_sender():
    given = model(sent_bytes=5.0)
    found = Strategy3D(1, 1, 1, (2, 2), overlap=OverlapOptions(transfers=False))
    # A microbatch takes 2 layers and 5 bytes on each of two stages.
    expected = (8 + 1) * (2 * 3 + 5 / 10)
    assert analytic_seconds(given, found) == pytest.approx(expected)
    assert simulate_strategy(given, found).seconds == pytest.approx(expected)
    hidden = Strategy3D(1, 1, 1, (2, 2))
    assert simulate_strategy(given, hidden).seconds < expected
    assert analytic_seconds(given, hidden) == pytest.approx((8 + 1) * 2 * 3 + 2 * 5 / 10)


def test_nothing_hides_behind_less_than_itself():
    """Stages that send for 10 s and compute for 6 s."""
    given = model(sent_bytes=100.0)
    found = Strategy3D(1, 1, 1, (2, 2))
    assert analytic_seconds(given, found) == pytest.approx(7 * 10 + 2 * 10 + 2 * 6)
    assert simulate_strategy(given, found).seconds >= analytic_seconds(given, found)


def test_on_machines_that_do_nothing_beside_sending_nothing_is_overlapped():
    still = dataclasses.replace(PAIR, overlap=0.0)
    strategies = [priced.strategy for priced in find(model(still, sent_bytes=5.0)).finalists]
    chosen = [s for s in strategies if s.stages > 1]
    assert any(not strategy.overlap.transfers for strategy in chosen)
    assert all(not strategy.overlap.gradients for strategy in strategies)


@pytest.mark.parametrize("random_model", [some, mixed])
def test_bounds_hold_with_overlap(random_model):
    hidden = 0
    for seed in (2, 5, 9):
        given = random_model(seed)
        space = StrategySpace(given)
        evaluation = Evaluation(space)
        for degrees in space.degrees:
            seconds = evaluation.price(space.lying(degrees, space.plain_order))
            assert lower_bound(given, degrees) <= seconds * (1 + 1e-9)
        hidden += any(priced.strategy.overlap.gradients for priced in evaluation.ranked())
    assert hidden


def test_a_strategy_says_what_is_overlapped():
    text = str(Strategy3D(2, 1, 1, (4,), overlap=OverlapOptions(gradients=True, transfers=False)))
    assert text.endswith("layers 4, gradients overlapped, transfers not overlapped")
