"""Which links groups of ranks have, when all of them communicate at once."""

import dataclasses
import math

import pytest

from tests.clusters import device, joined_by, two_levels
from tfpar.cluster.description import Cluster, Level, Node
from tfpar.cluster.lookup import find_cluster
from tfpar.cluster.network import Hop, Link, link_of, ring_links, route, transfer_link
from tfpar.spec import Mesh

DEVICE = device(10e12, 40e12, 16e9, 1e12, 5e-6)
INTRA, INTER = Link(8e9, 2e-6), Link(4e9, 50e-6)
CLUSTER = two_levels("two nodes", 2, 8, DEVICE, INTRA, INTER)


def link(sizes, axes, cluster=CLUSTER, pairwise=False):
    return link_of(cluster, Mesh.of(sizes), axes, pairwise)


@pytest.mark.parametrize(
    "sizes, axes, expected",
    [
        # data=2 x model=8: model is a node; 8 groups of data share each node's link.
        ([2, 8], (1,), INTRA),
        ([2, 8], (0,), Link(4e9 / 8, 50e-6)),
        ([2, 8], (0, 1), Link(4e9, 50e-6)),
        # data=8 x model=2: pairs of neighbours; 2 groups of 4 + 4 ranks.
        ([8, 2], (1,), INTRA),
        ([8, 2], (0,), Link(4e9 / 2, 50e-6)),
        # One ring over everything has the node's whole link.
        ([16], (0,), Link(4e9, 50e-6)),
        ([1, 16], (1,), Link(4e9, 50e-6)),
        ([1, 16], (0,), Link(math.inf, 0.0)),
        # One node's worth of ranks, however they are laid.
        ([8], (0,), INTRA),
        ([2, 4], (0,), INTRA),
        # data=4 x model=4: model in half a node, data in 4 rings of 2 + 2.
        ([4, 4], (1,), INTRA),
        ([4, 4], (0,), Link(4e9 / 4, 50e-6)),
        # data=2 x expert=2 x model=4.
        ([2, 2, 4], (1, 2), INTRA),
        ([2, 2, 4], (0, 2), Link(4e9 / 2, 50e-6)),
        ([2, 2, 4], (0,), Link(4e9 / 8, 50e-6)),
        # Ranks 0 to 7 are a node. Of (0 1 2) (3 4 5) (6 7 8) (9 10 11), the third crosses.
        ([4, 3], (1,), Link(4e9, 50e-6)),
        # 0 3 6 | 9, 1 4 7 | 10, 2 5 | 8 11: three rings through each node.
        ([4, 3], (0,), Link(4e9 / 3, 50e-6)),
    ],
)
def test_link_of_groups_on_two_nodes_of_eight(sizes, axes, expected):
    assert link(sizes, axes) == expected


def test_a_fast_link_between_nodes_does_not_speed_devices_up():
    fast = joined_by(CLUSTER, Link(80e9, 1e-6))
    # 80 GB/s for one ring, but a device has 8 GB/s; and the ring has links of both kinds.
    assert link([16], (0,), fast) == Link(8e9, 2e-6)


@pytest.mark.parametrize(
    "sizes, axes, times",
    [
        # Each of 8 sends 8 of its 15 parts to the other node.
        ([16], (0,), 8 * 8 / 15),
        # 8 pairs side by side, one member each: all that is sent crosses.
        ([2, 8], (0,), 8),
        # 4 groups with 2 members a node, each with 2 of 3 parts for the other node.
        ([4, 4], (0,), 4 * 2 * 2 / 3),
    ],
)
def test_what_all_send_to_all_passes_the_node_link_member_by_member(sizes, axes, times):
    found = link(sizes, axes, pairwise=True)
    assert found.bandwidth == pytest.approx(4e9 / times) and found.latency_s == pytest.approx(50e-6)
    assert link([2, 8], (1,), pairwise=True) == INTRA


def test_a_route_has_the_levels_from_inside_out():
    assert route(CLUSTER, Mesh.of([4, 4]), (0,)) == (Hop(2, 8e9, 2e-6), Hop(2, 1e9, 50e-6))
    assert route(CLUSTER, Mesh.of([2, 8]), (0,)) == (Hop(2, 0.5e9, 50e-6),)
    assert route(CLUSTER, Mesh.of([2, 8]), (1,)) == (Hop(8, 8e9, 2e-6),)


def inside(*levels):
    return Cluster.regular("c", DEVICE, levels, len(levels))


def test_two_of_four_that_are_linked_directly_have_one_of_three_links():
    cluster = inside(Level(4, 600e9, 1e-6, "direct"))
    assert link([2, 2], (1,), cluster).bandwidth == 200e9
    assert link([4], (0,), cluster).bandwidth == 600e9
    assert transfer_link(cluster, ((0, 3),)) == Link(200e9, 1e-6)
    assert transfer_link(cluster, ((0, 1), (0, 2), (0, 3))) == Link(200e9, 1e-6), "a link each"


def test_neighbours_on_a_ring_have_one_of_two_links():
    cluster = inside(Level(4, 50e9, 1e-6, "ring"))
    assert link([2, 2], (1,), cluster).bandwidth == 25e9
    assert link([4], (0,), cluster).bandwidth == 50e9


def test_all_that_goes_over_a_bus_shares_it():
    cluster = inside(Level(4, 12e9, 1e-6, "bus"))
    assert link([4], (0,), cluster).bandwidth == 3e9, "a ring of four has four hops"
    assert link([2, 2], (1,), cluster).bandwidth == 3e9, "two pairs, both ways"
    assert transfer_link(cluster, ((0, 1),)).bandwidth == 12e9
    assert transfer_link(cluster, ((0, 1), (1, 0), (2, 3))).bandwidth == 4e9


UNEQUAL = Cluster(
    "unequal",
    (
        Node(DEVICE, (Level(2, 8e9, 1e-6),), count=2, uplink=1e9),
        Node(dataclasses.replace(DEVICE, memory_bytes=4e9), count=2, uplink=6e9),
    ),
    (Level(4, 6e9, 9e-6),),
)


def test_nodes_of_different_sizes_and_links():
    # Ranks 0 1 | 2 3 | 4 | 5: the ring enters nodes with 1 and with 6 GB/s.
    assert UNEQUAL.size == 6 and UNEQUAL.num_nodes == 4
    assert link([6], (0,), UNEQUAL) == Link(1e9, 9e-6)
    assert transfer_link(UNEQUAL, ((0, 1),)) == Link(8e9, 1e-6)
    assert transfer_link(UNEQUAL, ((1, 2),)) == Link(1e9, 9e-6)
    assert transfer_link(UNEQUAL, ((4, 5),)) == Link(6e9, 9e-6)
    assert ring_links(UNEQUAL, Mesh.of([6]), (0,)) == (8e9, 1e9, 8e9, 1e9, 6e9, 1e9)
    assert UNEQUAL.device.memory_bytes == 4e9, "the step waits for the weakest"


def test_rings_side_by_side_share_the_links_of_nodes():
    # 0 2 4 and 1 3 5 pass the first two nodes together.
    assert ring_links(UNEQUAL, Mesh.of([3, 2]), (0,)) == (0.5e9, 0.5e9, 0.5e9)


def test_a_thousand_devices_are_no_trouble():
    mesh = Mesh.of([128, 8])
    cluster = find_cluster("dgx-a100", mesh)
    assert link_of(cluster, mesh, (0,)).bandwidth == pytest.approx(180e9 / 8)
    assert link_of(cluster, mesh, (1,)).bandwidth == pytest.approx(240e9)
