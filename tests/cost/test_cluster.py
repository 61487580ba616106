"""Clusters: which link a group of ranks has; files, presets and what is refused."""

import dataclasses
import json

import pytest

from tfpar.cost.cluster import PRESETS, Cluster, Device, Link
from tfpar.spec import Mesh, TfparError

DEVICE = Device(10e12, 40e12, 16e9, 1e12, 5e-6)
INTRA, INTER = Link(8e9, 2e-6), Link(4e9, 50e-6)
CLUSTER = Cluster("two nodes", 2, 8, DEVICE, INTRA, INTER)


def link(sizes, axes, cluster=CLUSTER, pairwise=False):
    return cluster.link_of(Mesh.of(sizes), axes, pairwise)


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
        ([1, 16], (0,), INTRA),
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
    ],
)
def test_link_of_groups_on_two_nodes_of_eight(sizes, axes, expected):
    assert link(sizes, axes) == expected


def test_groups_that_only_some_of_cross_wait_for_those_that_do():
    # Ranks 0 to 7 are a node. Of (0 1 2) (3 4 5) (6 7 8) (9 10 11), the third crosses.
    assert link([4, 3], (1,)) == Link(4e9, 50e-6)
    # 0 3 6 | 9, 1 4 7 | 10, 2 5 | 8 11: three rings through each node.
    assert link([4, 3], (0,)) == Link(4e9 / 3, 50e-6)


def test_a_node_link_faster_than_the_devices_does_not_speed_them_up():
    fast = dataclasses.replace(CLUSTER, inter=Link(80e9, 1e-6))
    # 80 GB/s for one ring, but a device has 8 GB/s; and the ring has links of both kinds.
    assert link([16], (0,), fast) == Link(8e9, 2e-6)
    assert link([2, 8], (0,), fast) == Link(8e9, 2e-6), "8 groups with 10 GB/s each"


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
    assert found.bandwidth == pytest.approx(4e9 / times) and found.latency_s == 50e-6
    assert link([2, 8], (1,), pairwise=True) == INTRA


def test_check_names_the_mesh_and_the_cluster():
    CLUSTER.check(Mesh.of([2, 8]))
    CLUSTER.check(Mesh.of([3]))
    with pytest.raises(TfparError) as error:
        CLUSTER.check(Mesh.of([3, 8]))
    assert str(error.value) == (
        "The mesh data=3 x model=8 has 24 ranks, but cluster 'two nodes' has 16 devices (2 nodes "
        "of 8). Use a smaller mesh, or describe a larger cluster."
    )


# --- descriptions -------------------------------------------------------------------


def fields():
    return dataclasses.asdict(CLUSTER)


def test_a_description_round_trips(tmp_path):
    assert Cluster.of(CLUSTER) is CLUSTER
    assert Cluster.of(fields()) == CLUSTER
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(fields()))
    assert Cluster.of(str(path)) == CLUSTER
    assert Cluster.of(str(path)).fingerprint() == CLUSTER.fingerprint()


def test_name_and_overlap_may_be_left_out():
    given = fields()
    del given["name"], given["overlap"]
    cluster = Cluster.of(given)
    assert cluster.name == "unnamed" and cluster.overlap == 1.0


def test_whole_numbers_are_the_same_cluster():
    given = fields()
    given["device"] = {k: int(v) if v >= 1 else v for k, v in given["device"].items()}
    given["intra"]["bandwidth"], given["overlap"] = 8_000_000_000, 1
    assert Cluster.of(given).fingerprint() == CLUSTER.fingerprint()
    direct = dataclasses.replace(CLUSTER, intra=Link(8_000_000_000, 2e-6))
    assert direct.fingerprint() == CLUSTER.fingerprint()


def test_a_fingerprint_is_of_all_but_the_name():
    assert dataclasses.replace(CLUSTER, name="other").fingerprint() == CLUSTER.fingerprint()
    for change in (
        {"nodes": 3}, {"devices_per_node": 4}, {"overlap": 0.5}, {"intra": INTER}, {"inter": INTRA},
        {"device": dataclasses.replace(DEVICE, launch_s=0.0)},
    ):  # fmt: skip
        assert dataclasses.replace(CLUSTER, **change).fingerprint() != CLUSTER.fingerprint()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    "sizes, grid", [([2, 8], (2, 8)), ([4], (1, 4)), ([2, 2, 3], (2, 6)), (None, (1, 1))]
)
def test_a_preset_has_the_shape_of_the_mesh(name, sizes, grid):
    mesh = sizes and Mesh.of(sizes)
    cluster = Cluster.of(name, mesh)
    assert (cluster.nodes, cluster.devices_per_node) == grid and cluster.name == name
    assert Cluster.of(json.loads(json.dumps(dataclasses.asdict(cluster)))) == cluster
    if mesh:
        cluster.check(mesh)


def test_ranks_on_this_machine_share_it():
    one, four = Cluster.of("cpu"), Cluster.of("cpu", Mesh.of([2, 2]))
    assert four.device.flops == pytest.approx(one.device.flops / 4)
    assert four.device.memory_bytes == pytest.approx(one.device.memory_bytes / 4)
    assert four.overlap == 0.0, "what communicates is what would compute"


def without(*path):
    given = fields()
    part = given
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    return given


def having(value, *path):
    given = fields()
    part = given
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return given


ALL_FIELDS = (
    "It has name, nodes, devices_per_node, device (flops, half_flops, memory_bytes, "
    "memory_bandwidth, launch_s), intra and inter (bandwidth, latency_s), and may have overlap."
)
SHAPE = "Cluster 'two nodes' has {} nodes of {} devices; both are at least 1."
RATE = "Cluster 'two nodes': {} is {}; it must be above 0."
TIME = "Cluster 'two nodes': {} is {}; it must be a time in seconds, 0 or more."


@pytest.mark.parametrize(
    "given, message",
    [
        (without("nodes"), "the cluster lacks 'nodes'"),
        (without("device"), "the cluster lacks 'device'"),
        ({"nodes": 1}, "the cluster lacks 'devices_per_node', 'device', 'intra', 'inter'"),
        (without("device", "launch_s"), "'device' lacks 'launch_s'"),
        (without("inter", "latency_s"), "'inter' lacks 'latency_s'"),
        (having(1, "overlpa"), "the cluster has no field 'overlpa'"),
        (having(1, "intra", "latency_us"), "'intra' has no field 'latency_us'"),
        (having(8e9, "intra"), "'intra' is 8000000000.0"),
        (having("fast", "device", "flops"), "device.flops is 'fast', not a number"),
        (having(None, "inter", "bandwidth"), "inter.bandwidth is None, not a number"),
        (having("all", "overlap"), "overlap is 'all', not a number"),
        (having(2.5, "nodes"), "nodes is 2.5, not a whole number"),
        (having("8", "devices_per_node"), "devices_per_node is '8', not a whole number"),
        ([1, 2], "[1, 2] is of type list"),
        (3, "3 is of type int"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_description_says_which_field_and_which_there_are(given, message):
    with pytest.raises(TfparError) as error:
        Cluster.of(given)
    assert str(error.value) == f"Not a cluster description: {message}. {ALL_FIELDS}"


@pytest.mark.parametrize(
    "given, message",
    [
        (having(0, "nodes"), SHAPE.format(0, 8)),
        (having(-1, "devices_per_node"), SHAPE.format(2, -1)),
        (having(0, "device", "flops"), RATE.format("device.flops", 0.0)),
        (having(-1, "device", "half_flops"), RATE.format("device.half_flops", -1.0)),
        (having(0, "device", "memory_bytes"), RATE.format("device.memory_bytes", 0.0)),
        (having(0, "device", "memory_bandwidth"), RATE.format("device.memory_bandwidth", 0.0)),
        (having(0, "intra", "bandwidth"), RATE.format("intra.bandwidth", 0.0)),
        (having(float("nan"), "inter", "bandwidth"), RATE.format("inter.bandwidth", "nan")),
        (having(-1, "device", "launch_s"), TIME.format("device.launch_s", -1.0)),
        (having(-1, "intra", "latency_s"), TIME.format("intra.latency_s", -1.0)),
        (having(float("nan"), "inter", "latency_s"), TIME.format("inter.latency_s", "nan")),
        (
            having(1.5, "overlap"),
            "Cluster 'two nodes': overlap is 1.5; it must be from 0 (a device waits for its "
            "communication) to 1 (it computes on).",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_numbers_that_cannot_be_are_refused(given, message):
    with pytest.raises(TfparError) as error:
        Cluster.of(given)
    assert str(error.value) == message


def test_no_such_cluster_says_which_there_are():
    with pytest.raises(TfparError) as error:
        Cluster.of("h100")
    assert str(error.value) == (
        "There is no cluster 'h100': neither a file nor one of 'a100', 'cpu', 'cpu-processes', "
        "'v100-ethernet', 'v100-nvlink'."
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text("{nodes: 2")
    for unreadable in (path, tmp_path):
        with pytest.raises(TfparError, match="Cannot read the cluster file .*tmp.*: .+"):
            Cluster.of(str(unreadable))
    path.write_text("[]")
    with pytest.raises(TfparError, match=r"Not a cluster description: \[\] is of type list\."):
        Cluster.of(str(path))
