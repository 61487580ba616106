"""Table 3 and Fig. 10 of ATP: the baseline's formulas by hand, and chunks of a small model."""

from __future__ import annotations

import math

import pytest

import tfpar as tap
from benchmarks import atp, summa
from benchmarks import atp_throughput as throughput
from tfpar.cluster import Cluster, Device, Level, fit_to_mesh, read_preset

DEVICE = Device({"float32": 1e12, "float16": 2e12}, 1e10, 1e11, launch_s=1e-6, half_size=16)


def flat(devices, latency_s=0.0):
    """Devices on one switch, each with a link of 1 GB/s."""
    level = Level(devices, 1e9, latency_s)
    return Cluster.regular("flat", DEVICE, [level])


def test_a_grid_is_as_wide_as_the_devices_let_it_be():
    assert summa.Grid.of(16) == summa.Grid(4, 1)
    assert summa.Grid.of(8) == summa.Grid(2, 2)
    assert summa.Grid.of(8).mesh.shape == (2, 2, 2)
    with pytest.raises(ValueError, match="6 devices make no grid"):
        summa.Grid.of(6)


def test_summa_of_one_product_by_hand():
    """On 2 x 2 devices [8, 4] x [4, 6]: in two rounds, a panel of A is of 8 elements and one of B
    of 6; forward, and twice backward; each link belongs to the device that sends."""
    grid, one = summa.Grid(2), [summa.Weight(4, 6)]
    seconds = summa.communication_seconds(flat(4), grid, one, tokens=8, item_bytes=2)
    assert seconds == pytest.approx(3 * 2 * (8 + 6) * 2 / 1e9)
    later = summa.communication_seconds(flat(4, 1e-3), grid, one, tokens=8, item_bytes=2)
    assert later == pytest.approx(seconds + 3 * 2 * 2 * 1e-3)  # two broadcasts a round
    sides = 4, 2, 3
    rate = 2e12 * math.prod(n / (n + 16) for n in sides)
    found = summa.product_seconds(DEVICE, grid, one, tokens=8, dtype="float16")
    assert found == pytest.approx(3 * 2 * (2 * math.prod(sides) / rate + 1e-6))


@pytest.mark.parametrize("side", [2, 4])
def test_a_layer_moves_what_optimus_says(side):
    """log2(q) / q * (7 b s h + 12 h^2) forward, three times that in all."""
    tokens, hidden = 4096, 256
    weights = summa.weights_of_layer(hidden)
    seconds = summa.communication_seconds(flat(side**2), summa.Grid(side), weights, tokens, 2)
    elements = math.log2(side) / side * (7 * tokens * hidden + 12 * hidden**2)
    assert seconds == pytest.approx(3 * elements * 2 / 1e9)


def test_grids_side_by_side_share_the_batch_and_sum_gradients():
    one, tokens = [summa.Weight(64, 32)], 512
    alone = summa.communication_seconds(flat(4), summa.Grid(2), one, tokens // 2, 2)
    both = summa.communication_seconds(flat(8), summa.Grid(2, depth=2), one, tokens, 2)
    assert both == pytest.approx(alone + 64 * 32 / 4 * 2 / 1e9)  # an all-reduce of two


def test_operations_are_those_of_the_paper_s_table_2():
    by_table = {"M1": 2.625, "M2": 9.75, "M3": 37.5, "M4": 83.25}
    found = {name: throughput.layer_flops(h) / 2**40 for name, h in atp.HIDDEN.items()}
    assert found == pytest.approx(by_table)


@pytest.mark.slow
def test_chunks_hide_what_slow_links_take(monkeypatch):
    monkeypatch.setattr(atp, "LENGTH", 128)
    monkeypatch.setattr(atp, "HEAD_SIZE", 32)
    monkeypatch.setattr(throughput, "TOKENS", atp.BATCH * 128)
    step = atp.capture(256)
    cluster = fit_to_mesh(read_preset("atp-ic4"), tap.Mesh.of([4]))
    slow = cluster.with_device(launch_s=0.0, flops={"float32": 1e12})
    rows = list(throughput.contenders(step, slow, 256))
    choose_num_chunks = {row["chunks"]: row for row in rows if row["contender"] == "ATP"}
    assert set(choose_num_chunks) == {1, 2, 4} and sum("chosen" in row for row in rows) == 1
    for row in choose_num_chunks.values():
        whole = row["compute_s"] + row["waiting_s"] - row["hidden_s"]
        assert row["step_s"] == pytest.approx(whole)
    assert choose_num_chunks[1]["hidden_s"] == 0 < choose_num_chunks[2]["hidden_s"]
    by_name = {row["contender"]: row for row in rows}
    assert by_name["Megatron-LM"]["mesh"] == [4, 1] and by_name["2-D"]["mesh"] == [1, 2, 2]
    assert all(
        row["tflops"] * row["step_s"] == pytest.approx(2 * throughput.layer_flops(256) / 4 / 1e12)
        for row in rows
    )
