"""Times of collectives against numbers worked out by hand."""

import pytest

from tfpar.cost.cluster import Cluster, Device, Link
from tfpar.cost.collectives import collective_seconds, seconds_per_byte, startup_seconds
from tfpar.propagation.reshard import COLLECTIVES
from tfpar.spec import Mesh

DEVICE = Device(1e12, 1e12, 1e9, 1e12, 0.0)
CLUSTER = Cluster("test", 2, 4, DEVICE, Link(1e9, 1e-6), Link(0.5e9, 10e-6))
FOUR = Mesh.of([2, 4])  # model is a node; 4 groups of data share 0.5 GB/s


@pytest.mark.parametrize(
    "kind, axes, num_bytes, seconds",
    [
        # In the node, 4 ranks: 2 rounds, a half and a quarter (twice for an all-reduce).
        ("all_reduce", (1,), 4e6, 4e-6 + 2 * 3e6 / 1e9),
        ("reduce_scatter", (1,), 4e6, 2e-6 + 3e6 / 1e9),
        ("all_gather", (1,), 4e6, 2e-6 + 3e6 / 1e9),
        ("all_to_all", (1,), 4e6, 3e-6 + 3e6 / 1e9),
        ("broadcast", (1,), 4e6, 2e-6 + 4e6 / 1e9),
        # Between two nodes, pairs; 0.125 GB/s for each.
        ("all_reduce", (0,), 4e6, 20e-6 + 2 * 2e6 / 0.125e9),
        ("all_gather", (0,), 4e6, 10e-6 + 2e6 / 0.125e9),
        ("all_to_all", (0,), 4e6, 10e-6 + 2e6 / 0.125e9),
        ("broadcast", (0,), 4e6, 10e-6 + 4e6 / 0.125e9),
        # All 8 ranks: 3 rounds.
        ("all_reduce", (0, 1), 8e6, 60e-6 + 2 * 7e6 / 0.5e9),
        ("reduce_scatter", (0, 1), 8e6, 30e-6 + 7e6 / 0.5e9),
        ("broadcast", (0, 1), 8e6, 30e-6 + 8e6 / 0.5e9),
        # 4 ranks of a node send 4 of 8 parts (1 MB each) to the other node.
        ("all_to_all", (0, 1), 8e6, 70e-6 + 4 * 4e6 / 0.5e9),
        # Nothing to send: the start alone.
        ("all_reduce", (1,), 0, 4e-6),
    ],
)
def test_seconds(kind, axes, num_bytes, seconds):
    assert collective_seconds(kind, axes, num_bytes, FOUR, CLUSTER) == pytest.approx(
        seconds, rel=1e-12
    )


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_rank_sends_nothing(kind):
    assert collective_seconds(kind, (0,), 1e9, Mesh.of([1, 4]), CLUSTER) == 0.0
    assert startup_seconds(kind, (0,), Mesh.of([1, 4]), CLUSTER) == 0.0


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_time_is_start_and_bytes(kind):
    start = startup_seconds(kind, (0, 1), FOUR, CLUSTER)
    rate = seconds_per_byte(kind, (0, 1), FOUR, CLUSTER)
    assert start > 0 and rate > 0
    for num_bytes in (1, 1000, 10**9):
        assert (
            collective_seconds(kind, (0, 1), num_bytes, FOUR, CLUSTER) == start + num_bytes * rate
        )


def test_scattering_and_gathering_is_an_all_reduce():
    parts = [collective_seconds(k, (1,), 1e6, FOUR, CLUSTER) for k in COLLECTIVES[:3]]
    assert parts[0] == pytest.approx(parts[1] + parts[2])


def test_an_unknown_kind_is_no_free_collective():
    with pytest.raises(KeyError, match="all_scatter"):
        collective_seconds("all_scatter", (1,), 1.0, FOUR, CLUSTER)
