"""What a 3-D strategy takes, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from tests.search.three_d.tables import cluster, equal_layers
from tfpar.search.three_d.price import Model, fits, quick_seconds, simulated, stored_bytes
from tfpar.search.three_d.strategy import Strategy
from tfpar.search.three_d.table import LayerTable
from tfpar.spec import PlanError

ALIKE = {"fast": 1.0}
FOUR = cluster(("fast", 2, 100.0, 10.0), ("fast", 2, 100.0, 10.0))


def model(batch=8, on=FOUR, layers=4, speeds=ALIKE, **fields):
    return Model(equal_layers(layers, speeds, **fields), on, batch)


def test_a_pipeline_of_equal_stages_has_the_closed_form():
    """(M + K - 1) (F + B), of one layer a stage."""
    found = Strategy(1, 1, 1, (1, 1, 1, 1))
    assert quick_seconds(model(), found) == pytest.approx((8 + 3) * 3)
    assert simulated(model(), found).seconds == pytest.approx((8 + 3) * 3)


def test_gradients_are_summed_by_equation_1():
    """Four ranks, a ring with two links of 100 and two of 10 bytes/s, 80 bytes."""
    found = Strategy(4, 1, 1, (4,))
    given = model(gradient_bytes=20.0)
    ring = 2 * 80 / 4 * (2 / 100 + 2 / 10)
    assert quick_seconds(given, found) == pytest.approx(2 * 4 * 3 + ring)
    # A ring whose parts all move at once: 2 (N - 1) / N of the payload over the slowest link.
    assert simulated(given, found).seconds == pytest.approx(2 * 4 * 3 + 2 * 3 / 4 * 80 / 10)


def test_tensor_ranks_sum_in_both_passes():
    found = Strategy(1, 2, 1, (2, 2))
    given = model(reduced_bytes=50.0)
    forward, summing = 2 * 1 / 2, 2 * 1 / 2 * 2 * 50 / 100
    own = 3 * forward + 2 * summing
    assert simulated(given, found).seconds == pytest.approx((8 + 1) * own)


def test_tensor_ranks_are_best_within_a_machine():
    given = model(reduced_bytes=50.0)
    within = Strategy(1, 2, 1, (2, 2), ranks=(0, 1, 2, 3))
    across = Strategy(1, 2, 1, (2, 2), ranks=(0, 2, 1, 3))
    for price in (quick_seconds, lambda *args: simulated(*args).seconds):
        assert price(given, within) < price(given, across)


def test_two_stages_on_the_same_machines_share_their_links():
    """Each stage has a ring over the two machines: half of 10 bytes/s for each."""
    given = model(gradient_bytes=20.0)
    found = Strategy(2, 1, 4, (2, 2), ranks=(0, 2, 1, 3))
    alone = 2 * 2 * 4 * 3  # one microbatch of 4 through 2 stages of 2 layers
    assert simulated(given, found).seconds == pytest.approx(alone + 2 * 1 / 2 * 40 / 5)


def test_transfers_there_and_back_are_counted_once_each():
    found = Strategy(1, 1, 8, (2, 2), ranks=(0, 2))
    given = model(sent_bytes=5.0)
    expected = 8 * 4 * 3 + 2 * 8 * 5 / 10
    assert quick_seconds(given, found) == pytest.approx(expected)
    assert simulated(given, found).seconds == pytest.approx(expected)


def test_each_stage_takes_what_its_own_device_does():
    on = cluster(("fast", 1, 1.0, 10.0), ("slow", 1, 1.0, 10.0))
    given = model(on=on, speeds={"fast": 2.0, "slow": 1.0}, layers=6)
    assert simulated(given, Strategy(1, 1, 8, (4, 2))).seconds == pytest.approx(8 * (6 + 6))
    assert simulated(given, Strategy(1, 1, 8, (2, 4))).seconds == pytest.approx(8 * (3 + 12))


def test_a_pipeline_is_as_slow_as_its_slowest_copy():
    """Equation 2, of copies of one stage on unlike devices."""
    on = cluster(("fast", 1, 1.0, 10.0), ("slow", 1, 1.0, 10.0))
    given = model(on=on, speeds={"fast": 2.0, "slow": 1.0})
    assert quick_seconds(given, Strategy(2, 1, 1, (4,))) == pytest.approx(4 * 4 * 3)


def test_memory_is_that_of_the_microbatches_in_flight():
    given = model(fixed_bytes=100.0, kept_bytes=7.0)
    found = Strategy(1, 2, 2, (1, 3))
    expected = (1 * (100 + 2 * 2 * 7) / 2, 3 * (100 + 1 * 2 * 7) / 2)
    assert stored_bytes(given, found) == pytest.approx(expected)
    peaks = [peak.num_bytes for peak in simulated(given, found).peaks]
    assert peaks == pytest.approx(expected)
    assert fits(given, found)
    small = Model(given.table, cluster(("fast", 4, 100.0, 1.0), memory_bytes=160.0), 8)
    assert not fits(small, found)
    assert fits(small, Strategy(1, 2, 2, (2, 2)))


def test_what_does_not_fit_together_is_named():
    with pytest.raises(PlanError, match="have 3 layers, the model has 4"):
        quick_seconds(model(), Strategy(1, 1, 1, (1, 2)))
    with pytest.raises(PlanError, match="has rank 7, but cluster 'small' has 4 devices"):
        quick_seconds(model(), Strategy(1, 1, 1, (4,), ranks=(7,)))
    with pytest.raises(PlanError, match="batch of 8 does not divide into 3 copies"):
        quick_seconds(model(), Strategy(3, 1, 1, (4,)))
    with pytest.raises(PlanError, match="'block' have no time on 'other' with tensor"):
        quick_seconds(model(on=cluster(("other", 1, 1.0, 1.0))), Strategy(1, 1, 1, (4,)))
    with pytest.raises(PlanError, match="need 4 different ranks; the placement has 3"):
        Strategy(4, 1, 1, (4,), ranks=(0, 1, 2, 2))
    with pytest.raises(PlanError, match="each has one at least"):
        Strategy(1, 1, 1, (4, 0))
    with pytest.raises(PlanError, match="without layers"):
        LayerTable({}, ())
    with pytest.raises(PlanError, match="of kind 'head'; there are 'block'"):
        LayerTable(equal_layers(1, ALIKE).kinds, ("head",))
