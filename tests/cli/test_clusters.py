"""`tfpar clusters`: the machines that plans can be made for by name."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from tfpar.cli.main import main
from tfpar.cluster import find_cluster, preset_names, write_cluster


def tfpar(command: str) -> int:
    return main(shlex.split(command))


def test_all_presets_are_listed(capsys):
    assert tfpar("clusters") == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line]
    listed = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows[1:]}
    assert sorted(filter(None, listed)) == preset_names()
    assert listed["rhino-m8"] == ["2 nodes of 8", "16 V100-SXM2-32GB", "12 GB/s, 130 GB/s"]
    assert listed["atp-ic4"] == ["16 nodes of 1", "16 A100-SXM4-80GB", "25 GB/s"]
    assert listed["gcp-a3-a2"][2] == "90 GB/s, 360 GB/s or 240 GB/s"  # of unlike nodes


def test_one_is_shown_by_its_devices_and_links(capsys, tmp_path):
    assert tfpar("clusters dgx-a100") == 0
    preset = capsys.readouterr().out
    assert preset.startswith("Cluster 'dgx-a100': 16 devices, 2 nodes of 8\n")
    assert "float32 100 TFLOP/s, float16 220 TFLOP/s" in preset and "80 GB" in preset
    between, inside = (line for line in preset.splitlines() if "| switch " in line)
    assert "between nodes" in between and "180 GB/s" in between and "8 us" in between
    assert "in a node" in inside and "8 gpu" in inside and "240 GB/s" in inside
    path = tmp_path / "ours.toml"
    write_cluster(find_cluster("dgx-a100"), path)
    assert tfpar(f"clusters {path}") == 0
    assert capsys.readouterr().out == preset


def test_figures_that_were_measured_are_rounded(capsys, tmp_path):
    path = tmp_path / "ours.toml"
    write_cluster(find_cluster("dgx-a100").with_device(memory_bytes=25_276_502_016.0), path)
    assert tfpar(f"clusters {path}") == 0
    assert "| 25.3 GB " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "rhino-m8", "cpu"])
def test_json_holds_the_same(capsys, name):
    assert tfpar(f"clusters {name} --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 1
    assert [c["name"] for c in found["clusters"]] == ([name] if name else preset_names())
    for described in found["clusters"]:
        cluster = find_cluster(described["name"])
        assert described["num_devices"] == cluster.num_devices
        assert described["shape"] == cluster.shape_text()
        assert described["nodes"][0]["device"]["flops"] == dict(cluster.nodes[0].device.flops)
        assert [v["bandwidth"] for v in described["levels"]] == [
            level.bandwidth for level in cluster.levels
        ]
    if name == "cpu":  # computes in the memory of its host
        assert found["clusters"][0]["nodes"][0]["device"]["host_bandwidth"] is None


def test_an_unknown_name_is_refused_with_those_that_there_are(capsys):
    assert tfpar("clusters a100") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("tfpar clusters: There is no cluster 'a100'") and "'dgx-a100'" in err


@pytest.mark.slow
def test_it_needs_no_tensorflow():
    code = (
        "import sys; from tfpar.cli.main import main\n"
        "assert main(['clusters']) == 0 and not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
