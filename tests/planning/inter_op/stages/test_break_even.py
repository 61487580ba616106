"""At what links another plan is taken, of a choice that is given."""

from __future__ import annotations

import pytest

from tfpar.planning.deadline import Deadline
from tfpar.planning.inter_op.stages.break_even import MOST, NEAR, find_break_even_factor


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("turn", [1.05, 3.0, 700.0])
def test_the_factor_is_one_at_which_the_choice_has_turned_and_nearly_the_least(turn, first):
    asked: list[float] = []

    def wins(factor: float) -> bool:
        asked.append(factor)
        return factor >= turn

    found = find_break_even_factor(wins, first, Deadline())
    assert found is not None and turn <= found <= turn * NEAR
    assert len(asked) <= 16
    slower = find_break_even_factor(lambda factor: factor <= 1 / turn, first, Deadline())
    assert slower is not None and turn <= 1 / slower <= turn * NEAR


def test_no_links_may_be_enough():
    asked: list[float] = []
    assert (
        find_break_even_factor(lambda factor: bool(asked.append(factor)), True, Deadline()) is None
    )
    assert asked == [MOST, 1 / MOST]


def test_nothing_is_found_when_the_time_is_over():
    assert find_break_even_factor(lambda factor: True, True, Deadline(-1.0)) is None
