"""ATP's hierarchical communication matrix against the numbers that the paper works out."""

import numpy as np
import pytest

from tests.clusters import device
from tfpar.cluster.description import Cluster, Level
from tfpar.cluster.lookup import find_cluster
from tfpar.cluster.matrix import (
    device_meshes,
    hierarchical_matrix,
    link_bandwidths,
    reduce_bandwidths,
    tensor_parallel_seconds,
)

DEVICE = device(1e12, 2e12, 80e9, 1e12, 0.0)

# Fig. 7(a): four nodes on 200 Gbit/s HDR; in each, 4 links of 50 GB/s between every two GPUs.
FIG_7A = Cluster.regular("fig. 7(a)", DEVICE, [Level(4, 25e9, 0.0), Level(4, 600e9, 0.0, "direct")])


def test_layers_of_fig_7a():
    nodes, gpus = hierarchical_matrix(FIG_7A)
    off_diagonal = ~np.eye(4, dtype=bool)
    assert (nodes.p2p[off_diagonal] == 25e9).all() and nodes.group == 25e9
    assert (gpus.p2p[off_diagonal] == 200e9).all() and gpus.group == 600e9
    assert not gpus.p2p.diagonal().any()


def test_layers_of_fig_7b():
    rings, devices = hierarchical_matrix(find_cluster("atp-ic6"))
    assert rings.p2p[0].tolist() == [0, 100e9, 0, 100e9] and rings.group == 200e9
    assert devices.p2p[1].tolist() == [25e9, 0, 25e9, 0] and devices.group == 50e9


@pytest.mark.parametrize(
    ("topology", "count", "links"),
    [("ring", 2, 1), ("ring", 4, 2), ("direct", 4, 3), ("switch", 4, 1)],
)
def test_what_two_members_have_of_a_bandwidth(topology, count, links):
    """A member of a ring of two has one neighbour, of a larger ring two (Fig. 7b)."""
    assert Level(count, 6e9, 0.0, topology).pair_bandwidth == pytest.approx(6e9 / links)
    assert Level(1, 6e9, 0.0, topology).pair_bandwidth == 6e9


def test_device_mesh_8_2_of_fig_7a():
    """§3.5: B2' is what two GPUs have, 200 GB/s; B1' the half of a node's 25 GB/s."""
    assert link_bandwidths(FIG_7A, 8, 2) == (12.5e9, 200e9)


def test_all_links_of_a_torus_are_used_by_meshes_of_its_shape():
    assert link_bandwidths(find_cluster("atp-ic6"), 4, 4) == (50e9, 50e9)


def test_one_layer_gives_both_dimensions_all_of_it():
    """§5.4: B1' = B2' = GroupBW on one flat layer."""
    cluster = find_cluster("atp-ic5")
    assert set(link_bandwidths(cluster, 8, 8)) == {450e9}


@pytest.mark.parametrize("d1, d2", device_meshes(16))
def test_flat_layer_costs_what_the_closed_form_of_section_5_4_says(d1, d2):
    closed = 2 / 25e9 * (14 * d2 + 4 * d1 - 18) / (d1 * d2)
    found = tensor_parallel_seconds(find_cluster("atp-ic4"), d1, d2, hidden_bytes=1.0)
    assert found == pytest.approx(closed)


def best(name, size):
    cluster = find_cluster(name)
    return min(device_meshes(size), key=lambda m: tensor_parallel_seconds(cluster, *m, 1.0))


def test_calibrated_ic1_takes_2_4_and_saves_46_percent():
    ic1 = find_cluster("atp-ic1")
    assert reduce_bandwidths(ic1, 2, 4) == (1.20e9, 4.95e9)
    assert best("atp-ic1", 8) == (2, 4)
    saved = 1 - tensor_parallel_seconds(ic1, 2, 4, 1.0) / tensor_parallel_seconds(ic1, 8, 1, 1.0)
    assert saved == pytest.approx(0.46, abs=0.01)


def test_sixteen_devices_of_ic4_take_8_2():
    assert best("atp-ic4", 16) == (8, 2)


def test_dual_nvlink_divides_the_pairs_link_by_its_groups():
    """§5.3: B1' of ATP-2 on IC2 is the half of what a pair has to the others."""
    assert link_bandwidths(find_cluster("atp-ic2"), 4, 2) == (16e9, 300e9)
    assert link_bandwidths(find_cluster("atp-ic2"), 8, 1)[0] == 32e9
