"""Times of collectives against numbers worked out by hand."""

import dataclasses

import pytest

from tests.clusters import device, two_levels
from tfpar.cluster import ALGORITHMS, Link, MeasuredCollective
from tfpar.cost.collectives import collective_seconds, transfer_seconds
from tfpar.spec import COLLECTIVES, Mesh

DEVICE = device(1e12, 1e12, 1e9, 1e12, 0.0)
CLUSTER = two_levels("test", 2, 4, DEVICE, Link(1e9, 1e-6), Link(0.5e9, 10e-6))
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
        # All 8 ranks: 3 rounds; a broadcast's tree crosses between nodes once.
        ("all_reduce", (0, 1), 8e6, 60e-6 + 2 * 7e6 / 0.5e9),
        ("reduce_scatter", (0, 1), 8e6, 30e-6 + 7e6 / 0.5e9),
        ("broadcast", (0, 1), 8e6, 12e-6 + 8e6 / 0.5e9),
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


def test_scattering_and_gathering_is_an_all_reduce():
    parts = [collective_seconds(k, (1,), 1e6, FOUR, CLUSTER) for k in COLLECTIVES[:3]]
    assert parts[0] == pytest.approx(parts[1] + parts[2])


def test_an_unknown_kind_is_no_free_collective():
    with pytest.raises(KeyError, match="all_scatter"):
        collective_seconds("all_scatter", (1,), 1.0, FOUR, CLUSTER)


# --- algorithms ----------------------------------------------------------------------


def seconds(algorithm, axes, num_bytes, kind="all_reduce", cluster=CLUSTER, mesh=FOUR):
    known = dataclasses.replace(cluster, algorithms=(algorithm,))
    return collective_seconds(kind, axes, num_bytes, mesh, known)


@pytest.mark.parametrize(
    "algorithm, axes, expected",
    [
        ("ring", (1,), 6e-6 + 2 * 3e6 / 1e9),
        ("tree", (1,), 4e-6 + 2 * 4e6 / 1e9),
        ("halving", (1,), 4e-6 + 2 * 3e6 / 1e9),
        ("hierarchical", (1,), 4e-6 + 2 * 3e6 / 1e9),
        # All ranks: 7 hops of the slowest link; 2 rounds in the node and 1 between.
        ("ring", (0, 1), 140e-6 + 2 * 3.5e6 / 0.5e9),
        ("tree", (0, 1), 24e-6 + 2 * 4e6 / 0.5e9),
        # Scattered in the node, summed between the two, gathered in the node.
        ("hierarchical", (0, 1), 24e-6 + 2 * 3e6 / 1e9 + 2 * 2e6 / 0.5e9),
        # 2 M / N times the sum of 1 / B over six links in nodes and two between.
        ("heterogeneous-ring", (0, 1), 140e-6 + 2 * 4e6 / 8 * (6 / 1e9 + 2 / 0.5e9)),
    ],
)
def test_an_all_reduce_of_4_mb(algorithm, axes, expected):
    assert seconds(algorithm, axes, 4e6) == pytest.approx(expected, rel=1e-12)


def test_gathers_take_half_of_an_all_reduce():
    for algorithm in ALGORITHMS:
        whole = seconds(algorithm, (0, 1), 4e6)
        for kind in ("all_gather", "reduce_scatter"):
            assert seconds(algorithm, (0, 1), 4e6, kind) == pytest.approx(whole / 2)


def test_a_library_takes_the_fastest_that_it_knows_for_a_size():
    both = dataclasses.replace(CLUSTER, algorithms=("ring", "tree"))
    for num_bytes, algorithm in ((1e3, "tree"), (1e9, "ring")):
        assert collective_seconds("all_reduce", (1,), num_bytes, FOUR, both) == seconds(
            algorithm, (1,), num_bytes
        )


def test_what_was_measured_on_the_very_group_counts():
    entry = MeasuredCollective("all_reduce", (2, 4), 1, 7e-6, 3e9)
    cluster = dataclasses.replace(CLUSTER, measured=(entry,))
    for sizes, axis in (([2, 4], 1), ([2, 1, 4], 2)):  # the same groups
        found = collective_seconds("all_reduce", (axis,), 3e6, Mesh.of(sizes), cluster)
        assert found == pytest.approx(7e-6 + 1e-3)
    for kind, axis in (("all_reduce", 0), ("all_gather", 1)):
        arguments = kind, (axis,), 3e6, FOUR
        assert collective_seconds(*arguments, cluster) == collective_seconds(*arguments, CLUSTER)


# --- transfers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "pairs, seconds",
    [
        ([(0, 0)], 0.0),
        ([], 0.0),
        # In the node; between nodes.
        ([(0, 3)], 1e-6 + 1e6 / 1e9),
        ([(3, 4)], 10e-6 + 1e6 / 0.5e9),
        # A stage of a node to a stage of the other: four share what joins the nodes.
        ([(0, 4), (1, 5), (2, 6), (3, 7)], 10e-6 + 1e6 / 0.125e9),
        # Links carry both ways at the same time.
        ([(0, 4), (5, 1)], 10e-6 + 1e6 / 0.5e9),
        ([(0, 1), (1, 2), (2, 3)], 1e-6 + 1e6 / 1e9),
        # One sender of two, two senders to one.
        ([(0, 1), (0, 2)], 1e-6 + 2e6 / 1e9),
        ([(1, 0), (2, 0)], 1e-6 + 2e6 / 1e9),
        # The slowest is waited for.
        ([(0, 1), (2, 4)], 10e-6 + 1e6 / 0.5e9),
    ],
)
def test_transfers_of_1_mb(pairs, seconds):
    assert transfer_seconds(pairs, 1e6, CLUSTER) == pytest.approx(seconds, rel=1e-12)


def test_transfers_of_a_part_are_between_its_ranks():
    part = CLUSTER.part([7, 0, 3])
    assert transfer_seconds([(0, 1)], 1e6, part) == transfer_seconds([(7, 0)], 1e6, CLUSTER)
    assert transfer_seconds([(1, 2)], 1e6, part) == transfer_seconds([(0, 3)], 1e6, CLUSTER)
