"""Whether a tensor goes from stage to stage whole or in slices: what takes less, by hand."""

from __future__ import annotations

import pytest

from tfpar.cluster import Cluster, Device, Level
from tfpar.cost.stage_transfers import ScatterGatherCost
from tfpar.spec import Mesh, Replicate, Shard

DEVICE = Device({"float32": 1e12}, 1e9, 1e12)
R, S = Replicate(), Shard(0)
MODEL = Mesh.of({"data": 1, "model": 4})
KIB = 1024


def nodes(between: float, within: float, latency_s: float = 0.0, **more) -> Cluster:
    """Two nodes of four devices; those of a node share its link."""
    levels = [Level(2, between, 0.0), Level(4, within, latency_s)]
    return Cluster.regular("nodes", DEVICE, levels, algorithms=("ring",), **more)


def two_stages(mesh: Mesh, cluster: Cluster) -> ScatterGatherCost:
    return ScatterGatherCost((mesh, mesh), cluster)


def axes(prices: ScatterGatherCost, spec, num_bytes: int = 4 * KIB) -> tuple[int, ...]:
    return prices.axes(spec, num_bytes, [num_bytes // 4], 0, 1)


def test_what_both_ways_take():
    """Four ranks share a link of 1 MB/s: whole 16 KiB go over it, in slices 4, and are gathered."""
    prices = two_stages(MODEL, nodes(1e6, 1e7, 1e-5))
    assert prices.seconds((), 4 * KIB, 0, 1) == pytest.approx(16 * KIB / 1e6)
    gathered = 3 * 1e-5 + 3 / 4 * 4 * KIB / 1e7
    assert prices.gather_seconds((1,), 4 * KIB, 1) == pytest.approx(gathered)
    assert prices.seconds((1,), 4 * KIB, 0, 1) == pytest.approx(4 * KIB / 1e6 + gathered)


def test_the_quicker_way_is_taken():
    assert axes(two_stages(MODEL, nodes(1e6, 1e9)), (R, R)) == (1,)
    assert axes(two_stages(MODEL, nodes(1e9, 1e6)), (R, R)) == ()
    late = two_stages(MODEL, nodes(1e9, 1e12, 1e-5))  # a gather begins after 30 us
    assert [bool(axes(late, (R, R), n * KIB)) for n in (4, 16)] == [False, True]


def test_stages_side_by_side_in_a_node_send_whole():
    one = Cluster.regular("one", DEVICE, [Level(8, 1e9, 0.0)])
    assert axes(two_stages(MODEL, one), (R, R)) == ()


def test_only_what_ranks_hold_alike_is_shared_out():
    mesh, machines = Mesh.of({"data": 2, "model": 2}), nodes(1e6, 1e9)
    prices = two_stages(mesh, machines)
    assert axes(prices, (S, R)) == (1,)
    assert axes(prices, (R, S)) == (0,)
    assert axes(prices, (S, Shard(1))) == ()
    assert axes(prices, (R, R)) == (0, 1)
    assert axes(prices, (R, S, R)) == (0,), "microbatches lie within ranks"


def test_slices_are_equal():
    prices = two_stages(Mesh.of({"data": 2, "model": 2}), nodes(1e6, 1e9))
    assert prices.axes((R, R), 60, [15], 0, 1) == ()
    assert len(prices.axes((R, R), 24, [6], 0, 1)) == 1, "in two, not in four"
    assert len(prices.axes((R, R), 24, [3, 2], 0, 1)) == 1, "one of the dims"
    assert prices.axes((R, R), 4, [], 0, 1) == ()


def test_slices_are_gathered_where_links_are_quick():
    """A stage of two nodes gathers within each of them."""
    levels = [Level(2, 1e6, 0.0), Level(2, 1e5, 0.0), Level(2, 1e9, 0.0)]
    prices = two_stages(Mesh.of({"rows": 2, "columns": 2}), Cluster.regular("c", DEVICE, levels))
    assert axes(prices, (R, R)) == (1,)


def test_stages_of_unlike_numbers_of_ranks():
    """A rank sends 4 KiB to each of four over a link of 1 MB/s, or a KiB, which they gather."""
    meshes, machines = (Mesh.of({"model": 1}), Mesh.of({"model": 4})), nodes(1e6, 1e9)
    prices = ScatterGatherCost(meshes, machines.part([0, 4, 5, 6, 7]))
    gathered = prices.gather_seconds((0,), 4 * KIB, 1)
    assert 0 < gathered < 1e-5
    assert prices.seconds((), 4 * KIB, 0, 1) == pytest.approx(16 * KIB / 1e6)
    assert prices.seconds((0,), 4 * KIB, 0, 1) == pytest.approx(4 * KIB / 1e6 + gathered)
    assert prices.axes((R,), 4 * KIB, [3, 8], 0, 1) == (0,), "the second dim is cut in four"
    assert prices.axes((R,), 4 * KIB, [3, 6], 0, 1) == ()
    assert prices.axes((R,), 4 * KIB, [3, 8], 1, 0) == (), "one rank gathers nothing"


def test_in_one_memory_nothing_is_copied():
    assert axes(two_stages(MODEL, nodes(1e6, 1e9, one_memory=True)), (R, R)) == ()
