"""What a training costs on several fleets, and which is the cheapest in time."""

from __future__ import annotations

import pytest

from tfpar.observability.report.budget import Training, choose_fleet, deadline_text
from tfpar.observability.report.what_if import Estimate


def fleet(mesh: str, samples_per_s: float, dollars_an_hour: float | None) -> Estimate:
    dollars = None if dollars_an_hour is None else dollars_an_hour / 3600 / samples_per_s * 1e6
    return Estimate(mesh, "ours", True, 1.0, samples_per_s, dollars)


FAST = fleet("fast", 1000.0, 40.0)
SLOW = fleet("slow", 250.0, 8.0)
UNPRICED = fleet("unpriced", 500.0, None)
TOO_LARGE = Estimate("large", "ours", False)

TRAINING = Training(samples_per_epoch=900_000, epochs=4)
"""3.6 million samples: an hour on `FAST` ($40), four on `SLOW` ($32), two on `UNPRICED`."""


def test_hours_and_dollars_are_sums_that_one_does_by_hand():
    assert TRAINING.hours(FAST) == pytest.approx(1.0)
    assert TRAINING.dollars(FAST) == pytest.approx(40.0)
    assert TRAINING.epoch_dollars(FAST) == pytest.approx(10.0)
    assert TRAINING.hours(SLOW) == pytest.approx(4.0)
    assert TRAINING.dollars(SLOW) == pytest.approx(32.0)
    assert TRAINING.hours(UNPRICED) == pytest.approx(2.0)
    assert TRAINING.dollars(UNPRICED) is None and TRAINING.epoch_dollars(UNPRICED) is None
    assert TRAINING.hours(TOO_LARGE) is None and TRAINING.dollars(TOO_LARGE) is None


FOR = "for 4 epochs of 900,000 samples"


@pytest.mark.parametrize(
    ("found", "hours", "chosen", "text"),
    [
        ([FAST, SLOW], 5, SLOW, f"The cheapest within 5 hours {FOR}: slow on ours, $32.00 in 4"),
        ([SLOW, FAST], 3, FAST, f"The cheapest within 3 hours {FOR}: fast on ours, $40.00 in 1"),
        ([FAST, SLOW], 0.5, FAST, f"Within 0.5 hours {FOR}: none. The nearest is fast on ours, "),
        ([FAST, UNPRICED], 3, FAST, "hour. Not compared, as their price is not known: unpriced "),
        ([FAST, UNPRICED], 1.5, FAST, "$40.00 in 1 hour."),
        ([UNPRICED, SLOW], 3, None, "hours " + FOR + ": in time, but without a price: unpriced "),
        ([UNPRICED, TOO_LARGE], 1, UNPRICED, "none. The nearest is unpriced on ours, 2 hours."),
        ([TOO_LARGE], 1, None, "none, as no plan fits."),
    ],
)
def test_the_cheapest_in_time_is_named_or_the_nearest(found, hours, chosen, text):
    training = Training(900_000, 4, hours)
    assert choose_fleet(found, training).fleet is chosen
    assert text in deadline_text(found, training)


def test_of_two_that_cost_the_same_the_fastest_is_taken():
    same = fleet("same", 2000.0, 80.0)
    assert choose_fleet([FAST, same], Training(900_000, 4, 2.0)).fleet is same
