"""What searches take a step to store before its graph is looked at op by op."""

from __future__ import annotations

import pytest

from tests.planning.tiny import SMALLEST, problem
from tfpar.cost import Cost
from tfpar.planning.memory.peak_model import PeakMemoryModel


def cost(gradients: float, activations: float, live: float | None = None, **kept: float) -> Cost:
    times, sizes = (0.0, 0.0, 0.0), (100.0, 50.0, gradients, activations, live)
    return Cost(1.0, times, times, 0.0, 0.0, 0, *sizes, **kept)


def test_until_a_plan_was_looked_at_both_sums_are_stored():
    assert PeakMemoryModel().live_bytes(cost(30.0, 70.0)) == 100.0


@pytest.mark.parametrize("live", [60.0, 70.0, 85.0, 100.0, 120.0])
def test_what_was_looked_at_stores_what_was_seen(live):
    seen = PeakMemoryModel.of(cost(30.0, 70.0, live))
    assert seen.live_bytes(cost(30.0, 70.0)) == pytest.approx(live)
    assert 0 <= seen.of_less <= 1.0 and seen.besides >= 0.0


def test_what_is_kept_of_the_smaller_sum_says_nothing_of_the_larger_one():
    seen = PeakMemoryModel.of(cost(700.0, 400.0, 720.0))  # whole weights: gradients are most of it
    assert seen.live_bytes(cost(5.0, 400.0)) == pytest.approx(400.25), "split, activations are"


def test_the_least_of_what_was_seen():
    one, other = PeakMemoryModel(1.0, 0.5, 3.0, 4.0, 6.0), PeakMemoryModel(0.9, 0.7, 2.0, 5.0, 5.0)
    assert one.least(other) == PeakMemoryModel(0.9, 0.5, 2.0, 4.0, 5.0)


def test_copies_of_activations_are_kept_by_each_microbatch_in_flight():
    seen = PeakMemoryModel.of(cost(30.0, 70.0, 150.0, copied_bytes=40.0))
    assert (seen.besides, seen.copied) == (10.0, 40.0)
    assert seen.live_bytes(cost(30.0, 70.0)) == pytest.approx(150.0)
    assert seen.in_microbatches(cost(30.0, 70.0), 10, 0.5) == pytest.approx(
        30.0 + 0.5 * 110.0 + 1.0
    )
    assert PeakMemoryModel.of(cost(30.0, 70.0, 120.0, copied_bytes=40.0)).copied == 20.0, (
        "not all at the peak"
    )


def test_what_is_gathered_of_variables_is_kept_once_for_all_microbatches():
    seen = PeakMemoryModel.of(cost(30.0, 70.0, 190.0, copied_bytes=40.0, gathered_bytes=20.0))
    assert (seen.besides, seen.copied, seen.gathered) == (30.0, 40.0, 20.0)
    assert seen.live_bytes(cost(30.0, 70.0)) == pytest.approx(190.0)
    assert seen.in_microbatches(cost(30.0, 70.0), 10, 0.5) == pytest.approx(
        30.0 + 20.0 + 0.5 * 110.0 + 3.0
    )
    most = PeakMemoryModel.of(cost(30.0, 70.0, 130.0, copied_bytes=40.0, gathered_bytes=20.0))
    assert (most.copied, most.gathered) == (10.0, 20.0), "all of them, whatever else is gone"


def test_microbatches_keep_the_sums_of_gradients_and_their_own_activations():
    seen = PeakMemoryModel(1.0, 0.5, 8.0)
    assert seen.in_microbatches(cost(30.0, 80.0), 4, 0.25) == pytest.approx(30.0 + 20.0 + 2.0)


def test_a_problem_in_microbatches_counts_what_they_store():
    asked = problem(SMALLEST["a layer"](), [2]).with_batch(microbatches=4, kept_part=0.5)
    assert asked.stored_bytes(cost(30.0, 80.0), PeakMemoryModel()) == pytest.approx(
        150.0 + 30.0 + 40.0
    )
    tight = asked.with_objective(memory_limit=200.0)
    assert tight.excess(cost(30.0, 80.0)) == 60.0, "as it was priced"
    assert tight.excess_in_parts(cost(30.0, 80.0)) == 20.0
    assert tight.excess_in_parts(None) == 0.0
