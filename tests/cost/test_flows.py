"""Links are shared fairly by what crosses them at once."""

import dataclasses
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfpar.cluster import (
    TRANSFER,
    Cluster,
    Device,
    Level,
    MeasuredCollective,
    path_between,
    read_preset,
    transfer_link,
)
from tfpar.cost.flows import Flows, fair_rates

LINKS = st.integers(0, 4)
PATHS = st.lists(st.lists(LINKS, min_size=1, max_size=3, unique=True), min_size=1, max_size=8)
WIDTHS = st.lists(st.integers(1, 20).map(Fraction), min_size=5, max_size=5)


@given(PATHS, WIDTHS)
@settings(deadline=None)
def test_rates_are_fair(paths, widths):
    """Max-min: each transfer has a full link on its way, on which none is faster."""
    found = fair_rates(dict(enumerate(paths)), dict(enumerate(widths)))
    load = {link: sum(found[i] for i, p in enumerate(paths) if link in p) for link in range(5)}
    assert all(load[link] <= widths[link] for link in range(5))
    for i, path in enumerate(paths):
        assert found[i] > 0
        assert any(
            load[link] == widths[link]
            and all(found[j] <= found[i] for j, p in enumerate(paths) if link in p)
            for link in path
        )


def test_what_a_full_link_leaves_goes_to_others():
    # Two through the narrow link, which is all that one of them crosses of the wide one.
    paths = {0: ["narrow"], 1: ["narrow", "wide"], 2: ["wide"]}
    assert fair_rates(paths, {"narrow": 2, "wide": 10}) == {0: 1, 1: 1, 2: 9}


def ends(flows, begins):
    """When transfers end that begin at times with (links, bytes), by the flows themselves."""
    waiting = sorted((at, name) for name, (at, _, _) in begins.items())
    due, found = {}, {}
    while waiting or due:
        next_end = min(due.values(), default=math.inf)
        if waiting and waiting[0][0] <= next_end:
            at, name = waiting.pop(0)
            due.update(flows.change({name: begins[name][1:]}, [], at))
        else:
            names = [name for name, end in due.items() if end == next_end]
            found.update((name, due.pop(name)) for name in names)
            due.update(flows.change({}, names, next_end))
    return found


def test_two_transfers_on_one_link():
    # Alone for 1 s (10 of 30 bytes), then half each: 20 and 15 bytes left at 5 bytes/s.
    begins = {0: (0, ["a"], 30), 1: (1, ["a"], 15)}
    assert ends(Flows({"a": 10}), begins) == pytest.approx({1: 4, 0: 4.5})


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6).map(Fraction),
            st.lists(LINKS, min_size=1, max_size=2, unique=True),
            st.integers(1, 30).map(Fraction),
        ),
        min_size=1,
        max_size=6,
    ),
    WIDTHS,
)
@settings(deadline=None)
def test_rates_over_time(begins, widths):
    """As if all rates were found anew at every moment, in exact numbers."""
    bandwidth = dict(enumerate(widths))
    found = ends(Flows(bandwidth), dict(enumerate(begins)))
    left = {i: num_bytes for i, (_, _, num_bytes) in enumerate(begins)}
    now, expected = Fraction(0), {}
    while left:
        running = {i: begins[i][1] for i in left if begins[i][0] <= now}
        rates = fair_rates(running, bandwidth)
        later = [begins[i][0] for i in left if begins[i][0] > now]
        then = min([*later, *(now + left[i] / rates[i] for i in running)])
        for i in running:
            left[i] -= rates[i] * (then - now)
            if not left[i]:
                del left[i]
                expected[i] = then
        now = then
    assert found == expected


@pytest.mark.parametrize("name", ["dgx-a100", "v100-ethernet", "rhino-m8", "atp-ic2"])
def test_paths_on_a_cluster_are_those_of_transfers(name):
    """Where transfers begin together, the slowest has the rate that they are priced with."""
    cluster = read_preset(name)
    assert isinstance(cluster, Cluster)
    count = min(cluster.size, 24)
    for pairs in (
        [(0, 1)],
        [(0, count - 1), (1, count - 2), (0, count // 2)],
        [(i, (i + count // 2) % count) for i in range(count)],
        [(i, 0) for i in range(1, count)],
    ):
        pairs = [(a, b) for a, b in pairs if a != b]
        paths, bandwidth, latency = {}, {}, 0.0
        for i, pair in enumerate(pairs):
            shared, seconds = path_between(cluster, *pair)
            paths[i] = [link.name for link in shared]
            bandwidth.update((link.name, link.bandwidth) for link in shared)
            latency = max(latency, seconds)
        link = transfer_link(cluster, tuple(sorted(pairs)))
        assert min(fair_rates(paths, bandwidth).values()) == pytest.approx(link.bandwidth)
        assert latency == link.latency_s


def test_transfers_start_as_they_were_found_to():
    """By the smallest groups that were measured and have both ranks; links have their rates."""
    links = [Level(2, 1e9, 1e-6), Level(2, 1e10, 1e-7)]
    within, between = (
        MeasuredCollective(TRANSFER, (2, 2), axis, startup_s, 5e8)
        for axis, startup_s in ((1, 1e-3), (0, 1e-2))
    )
    other = MeasuredCollective("broadcast", (4,), 0, 1.0, 1.0)
    device = Device({"float32": 1e9}, 1e9, 1e9)
    plain = Cluster.regular("plain", device, links)
    found = dataclasses.replace(plain, measured=(other, between, within))
    for pair, seconds in (((0, 1), 1e-3), ((2, 3), 1e-3), ((0, 2), 1e-2), ((3, 1), 1e-2)):
        assert path_between(found, *pair) == (path_between(plain, *pair)[0], seconds)
        link = transfer_link(found, (pair,))
        assert link == dataclasses.replace(transfer_link(plain, (pair,)), latency_s=seconds)
    assert path_between(found, 0, 3) == path_between(plain, 0, 3)  # in no group
    assert transfer_link(found, ((0, 1), (0, 2))).latency_s == pytest.approx(1e-2)
    assert path_between(found.part([2, 3]), 0, 1)[1] == pytest.approx(1e-3)
    assert path_between(found, 1, 1) == ((), 0.0)
