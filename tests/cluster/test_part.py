"""A part of a cluster: some ranks, which share the links of the whole."""

import dataclasses
import itertools

import pytest

import tfpar as tap
from tests.clusters import device, two_levels
from tfpar.cluster.description import Cluster, Level, MeasuredCollective, Node
from tfpar.cluster.files import cluster_of, describe
from tfpar.cluster.lookup import find_cluster, preset_names
from tfpar.cluster.network import Link, find_measurement, groups_of, link_of, ring_links, route
from tfpar.cost import collective_seconds
from tfpar.spec import Mesh, TfparError

DEVICE = device(1e12, 1e12, 1e9, 1e12, 0.0)
INTRA, INTER = Link(8e9, 2e-6), Link(4e9, 50e-6)
CLUSTER = two_levels("two nodes", 2, 4, DEVICE, INTRA, INTER)
PRESETS = [
    *(c for c in map(find_cluster, preset_names()) if 1 < c.size <= 64),
    find_cluster("dgx-a100", Mesh.of([2, 8])),
]


AXES = ((0,), (1,), (0, 1))


def meshes(size):
    """Those of two axes that `size` ranks make up."""
    return [Mesh.of([n, size // n]) for n in range(1, size + 1) if size % n == 0]


@pytest.mark.parametrize("cluster", PRESETS, ids=lambda c: c.name)
def test_the_part_of_all_ranks_is_the_whole(cluster):
    part = cluster.part(range(cluster.size))
    assert part == cluster and part.fingerprint() == cluster.fingerprint()


@pytest.mark.parametrize("cluster", PRESETS, ids=lambda c: c.name)
def test_a_part_that_is_one_node_has_no_slow_links(cluster):
    first = 0
    for node in (one for kind in cluster.nodes for one in [kind] * kind.count):
        part = cluster.part(range(first, first + node.size))
        alone = dataclasses.replace(
            cluster, nodes=(dataclasses.replace(node, count=1),), levels=(), measured=()
        )
        assert (part.size, part.device) == (node.size, node.device)
        for mesh, axes in itertools.product(meshes(node.size), AXES):
            assert route(part, mesh, axes) == route(alone, mesh, axes)
            assert link_of(part, mesh, axes, True) == link_of(alone, mesh, axes, True)
        first += node.size
    assert first == cluster.size


@pytest.mark.parametrize("cluster", PRESETS, ids=lambda c: c.name)
def test_groups_of_a_part_are_priced_as_they_lie_in_the_whole(cluster):
    """All ranks, column by column: groups along one axis are those along the other."""
    for mesh in meshes(cluster.size):
        rows, columns = mesh.shape
        turned = cluster.part([i * columns + j for j in range(columns) for i in range(rows)])
        for own, other in (((0,), (1,)), ((1,), (0,))):
            other_mesh = Mesh.of([columns, rows])
            assert groups_of(turned, other_mesh, own) == mesh.groups(other)
            assert route(turned, other_mesh, own) == route(cluster, mesh, other)
            assert ring_links(turned, other_mesh, own) == ring_links(cluster, mesh, other)
            for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast"):
                found = collective_seconds(kind, own, 1e6, other_mesh, turned)
                assert found == collective_seconds(kind, other, 1e6, mesh, cluster)


def test_the_first_ranks_are_what_a_smaller_mesh_has():
    mesh = Mesh.of([3, 2])
    part = CLUSTER.part(range(6))
    for kind, axes in itertools.product(("all_reduce", "all_to_all"), AXES):
        found = collective_seconds(kind, axes, 1e6, mesh, part)
        assert found == collective_seconds(kind, axes, 1e6, mesh, CLUSTER) > 0


def test_pipelines_side_by_side_share_what_joins_nodes():
    # Two ranks of each node: pairs between nodes have half of the link each, pairs within all.
    part = CLUSTER.part([0, 4, 1, 5])
    assert link_of(part, Mesh.of([2, 2]), (1,)) == Link(4e9 / 2, 50e-6)
    assert link_of(part, Mesh.of([2, 2]), (0,)) == INTRA
    # The same ranks in another order: now the first axis goes between nodes.
    turned = CLUSTER.part([0, 1, 4, 5])
    assert link_of(turned, Mesh.of([2, 2]), (0,)) == Link(4e9 / 2, 50e-6)
    assert link_of(turned, Mesh.of([2, 2]), (1,)) == INTRA
    # One pair has it alone.
    assert link_of(CLUSTER.part([0, 4]), Mesh.of([2]), (0,)) == INTER


def test_a_part_of_a_part_is_one_of_the_whole():
    assert CLUSTER.part([7, 5, 3, 1]).part([2, 0]) == CLUSTER.part([3, 7])


def test_what_was_measured_is_of_the_very_groups_of_the_whole():
    entry = MeasuredCollective("all_reduce", (2, 4), 1, 7e-6, 3e9)
    cluster = dataclasses.replace(CLUSTER, measured=(entry,))
    mesh = Mesh.of([2, 4])
    assert find_measurement(cluster, "all_reduce", mesh, (1,)) is entry
    turned = cluster.part([4, 5, 6, 7, 0, 1, 2, 3])  # the same groups
    assert find_measurement(turned, "all_reduce", mesh, (1,)) == entry
    assert find_measurement(cluster.part([0, 1, 4, 5]), "all_reduce", Mesh.of([1, 4]), (1,)) is None


def test_a_part_has_what_was_measured_on_some_of_the_groups():
    node, level = Node(DEVICE, count=4), Level(4, 1e9, 1e-6)
    slow = MeasuredCollective("all_reduce", (2, 2), 1, 2e-6, 1e6, (2, 3))
    fast = MeasuredCollective("all_reduce", (2, 2), 1, 1e-6, 1e9, (0, 1))
    every = MeasuredCollective("all_reduce", (2, 2), 1, 2e-6, 1e6)
    cluster = Cluster("four", (node,), (level,), measured=(every, fast, slow))
    pair = Mesh.of([2])
    assert find_measurement(cluster.part([0, 1]), "all_reduce", pair, (0,)) == fast
    assert find_measurement(cluster.part([2, 3]), "all_reduce", pair, (0,)) == slow
    assert find_measurement(cluster.part([1, 2]), "all_reduce", pair, (0,)) is None
    assert find_measurement(cluster.part([0, 1]), "all_gather", pair, (0,)) is None
    # Of several groups the slowest counts; of all, what was found for all.
    found = find_measurement(cluster.part([2, 3, 0, 1]), "all_reduce", Mesh.of([2, 2]), (1,))
    assert (found.startup_s, found.bandwidth) == (2e-6, 1e6)
    assert find_measurement(cluster, "all_reduce", Mesh.of([2, 2]), (1,)) is every


def test_groups_that_shared_a_link_say_nothing_of_one_alone():
    entry = MeasuredCollective("all_reduce", (2, 4), 0, 7e-6, 3e9)  # four pairs over one link
    cluster = dataclasses.replace(CLUSTER, measured=(entry,))
    assert find_measurement(cluster, "all_reduce", Mesh.of([2, 4]), (0,)) is entry
    assert find_measurement(cluster.part([0, 4]), "all_reduce", Mesh.of([2]), (0,)) is None


def test_the_device_of_a_part_is_the_slowest_that_it_has():
    slow = dataclasses.replace(DEVICE, memory_bytes=4e8)
    nodes = Node(DEVICE, (Level(2, 8e9, 1e-6),)), Node(slow, (Level(2, 8e9, 1e-6),))
    unequal = Cluster("unequal", nodes, (Level(2, 1e9, 1e-6),))
    assert unequal.part([0, 1]).device == DEVICE
    assert unequal.part([2]).device == slow
    assert unequal.part([1, 2]).device.memory_bytes == 4e8
    assert unequal.part([0]).with_memory(1e6).device.memory_bytes == 1e6


def test_every_rank_has_its_own_device_and_machine():
    whole = find_cluster("auto3d-heterogeneous")
    names = ["A100-SXM4-40GB"] * 12 + ["K80"] * 4
    assert [device.name for device in whole.devices] == names
    assert whole.machines == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 5, 6)
    part = whole.part([15, 3, 4])
    assert [device.name for device in part.devices] == ["K80", *["A100-SXM4-40GB"] * 2]
    assert part.machines == (6, 0, 1)


def test_a_part_is_written_and_read_as_clusters_are():
    part = CLUSTER.part([5, 4])
    assert cluster_of(describe(part)) == part != CLUSTER
    assert hash(part) != hash(CLUSTER) and part.fingerprint() != CLUSTER.fingerprint()
    assert "ranks" not in describe(CLUSTER)
    assert part.shape_text() == "2 of 2 nodes of 4"


@pytest.mark.parametrize(
    "ranks, message",
    [
        ([], "one rank at least"),
        ([0, 8], "rank 8, but it has 8 devices"),
        ([3, 3], "rank 3 2 times"),
        ([-1], "ranks is -1"),
        ("ab", "a list of ranks"),
        ([0.5], "ranks is 0.5"),
    ],
)
def test_ranks_that_a_cluster_does_not_have_are_refused(ranks, message):
    with pytest.raises(TfparError, match=message):
        CLUSTER.part(ranks)


def test_a_mesh_larger_than_a_part_is_refused():
    with pytest.raises(tap.TfparError, match="has 2 devices \\(2 of 2 nodes of 4\\)"):
        CLUSTER.part([0, 4]).check(Mesh.of([4]))
