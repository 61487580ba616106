"""What devices wait for hosts that issue their ops."""

from __future__ import annotations

import pytest

from tfpar.cost.host import UNHIDDEN, issued_in_order, waiting_for_host


@pytest.mark.parametrize("issued, running", [(0.0, 3.0), (2.0, 3.0), (3.0, 2.0), (5.0, 0.0)])
def test_the_longer_counts_and_a_part_of_the_shorter(issued, running):
    taken = running + waiting_for_host(issued, running)
    assert taken == pytest.approx(max(issued, running) + UNHIDDEN * min(issued, running))
    assert issued_in_order([(1, running, issued)]) == pytest.approx(taken)


def test_less_work_for_devices_is_less_time_even_where_hosts_are_slow():
    taken = [running + waiting_for_host(10.0, running) for running in (8.0, 4.0, 2.0)]
    assert taken[0] > taken[1] > taken[2] > 10


def in_order(*layers):
    whole = [sum(n * one[i] for n, *one in layers) for i in (0, 1)]
    return issued_in_order(layers) - UNHIDDEN * min(whole)


def test_a_device_runs_what_it_has_while_the_host_issues_the_next():
    """Ten layers that a device runs for 1 s, and a host issues in 2; and one of 5 and 0 s."""
    assert in_order((10, 1.0, 2.0), (1, 5.0, 0.0)) == pytest.approx(25)
    assert in_order((1, 5.0, 0.0), (10, 1.0, 2.0)) == pytest.approx(20)  # the host is 5 s ahead
    assert in_order((1, 30.0, 0.0), (10, 1.0, 2.0)) == pytest.approx(40)  # and never waited for
    assert issued_in_order([]) == 0
