"""How alike two orders are."""

import pytest

from benchmarks.correlation import shown, spearman


def test_rank_correlation():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 45]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)


def test_equal_values_share_their_rank():
    assert spearman([1, 2, 2, 3], [1, 2, 2, 9]) == pytest.approx(1)
    assert spearman([1, 2, 2, 4], [1, 2, 3, 4]) == pytest.approx(0.9486833)


def test_of_one_rank_nothing_is_known():
    assert spearman([1], [2]) is None
    assert spearman([1, 1], [1, 2]) is None
    assert (shown(None), shown(0.91249)) == ("-", "0.912")
