"""`tfpar estimate`: whether a model fits, and how fast it trains, on which machines."""

from __future__ import annotations

import json
import re

import pytest

from tests.cli.train import tfpar
from tfpar.cli.problem import parse_meshes
from tfpar.spec import Mesh, TfparError
from tfpar.tf.interop import graphs


def test_an_estimate_says_whether_it_fits_and_how_fast(folder, capsys):
    command = "estimate train.py:both --mesh 2 --cluster v100-ethernet"
    assert tfpar(command) == 0
    out = capsys.readouterr().out
    assert re.search(r"Fits: .* of 29.81 GiB a device", out) and "samples/s" in out
    assert tfpar(f"{command} --memory-limit 0.1kB") == 1
    out = capsys.readouterr().out
    assert out.startswith("Does not fit: No plan fits into the memory of a device of 'v100-eth")
    assert tfpar(f"{command} --memory-limit lots") == 2
    assert (
        "memory_limit is 'lots'; it must be a size above 0 such as '16 GiB'"
        in capsys.readouterr().err
    )


# --- several ------------------------------------------------------------------------------


def rows(out: str) -> list[list[str]]:
    """The cells of a table, without its head; cells that go over several lines as one."""
    found: list[list[str]] = []
    for line in out.splitlines():
        if not line.startswith("| "):
            continue
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells[0]:
            found.append(cells)
        else:
            found[-1] = [f"{a} {b}".strip() for a, b in zip(found[-1], cells, strict=True)]
    return found[1:]


@pytest.mark.slow
def test_meshes_and_clusters_are_ranked_in_one_table(folder, capsys, monkeypatch):
    traced = []
    trace = graphs.trace
    monkeypatch.setattr(
        "tfpar.tf.capture.step.trace", lambda *a, **k: traced.append(a[0]) or trace(*a, **k)
    )
    command = "estimate train.py:both --mesh 4,2x2,32x16 --cluster v100-ethernet,rhino-m8"
    assert tfpar(command) == 0
    once = traced.copy()
    found = rows(capsys.readouterr().out)
    assert len(found) == 6
    possible = [row for row in found if row[5] == "yes"]
    assert {(row[0], row[1]) for row in possible} == {
        (mesh, cluster) for mesh in ("data=4", "data=2 x model=2") for cluster in CLUSTERS
    }
    for row in found[4:]:  # a node has 8 devices
        assert row[0].startswith("data=32") and row[2:6] == ["-", "-", "-", "no"]
        assert "a node of" in row[6] and row[6].endswith("has 8")
    traced.clear()
    assert tfpar("estimate train.py:both --mesh 4 --cluster rhino-m8") == 0
    assert traced == once != []  # however many are asked for, the step is traced as for one
    capsys.readouterr()


CLUSTERS = ("v100-ethernet", "rhino-m8")


@pytest.mark.slow
def test_json_holds_what_single_estimates_say(folder, capsys):
    command = "estimate train.py:both --json --cluster v100-ethernet --cluster rhino-m8"
    assert tfpar(f"{command} --mesh 2 --mesh data=2,model=2") == 0
    together = json.loads(capsys.readouterr().out)
    assert together["version"] == 1
    seconds = [one["seconds"] for one in together["estimates"]]
    assert len(seconds) == 4 and seconds == sorted(seconds)
    for one in together["estimates"]:
        assert one["fits"] and one["plan"] and one["why"] == ""
        assert 0 < one["memory_bytes"] <= one["memory_limit_bytes"]
        assert one["samples_per_s"] == pytest.approx(8 / one["seconds"])
        mesh = {"data=2": "2", "data=2 x model=2": "data=2,model=2"}[one["mesh"]]
        alone = f"estimate train.py:both --json --mesh {mesh} --cluster {one['cluster']}"
        assert tfpar(alone) == 0
        assert json.loads(capsys.readouterr().out)["estimates"] == [one]
    assert tfpar(f"{command} --mesh 2 --top 1") == 0
    assert len(json.loads(capsys.readouterr().out)["estimates"]) == 1


def test_the_exit_code_says_whether_any_fits(folder, capsys):
    command = "estimate train.py:both --mesh 2,4 --cluster v100-ethernet"
    assert tfpar(f"{command} --memory-limit 0.1kB") == 1
    found = rows(capsys.readouterr().out)
    assert [row[5:] for row in found] == [["no", "does not fit"]] * 2
    assert all(row[2] == "-" and row[4] != "-" for row in found)  # what it would take
    assert tfpar("estimate broken.py:build --mesh 32x16,64x16 --cluster v100-ethernet") == 2
    err = capsys.readouterr().err  # before the script runs
    assert err.startswith("tfpar estimate: The mesh data=32 x model=16 asks for 32 nodes of 16")
    assert tfpar(f"{command},tpu") == 2
    assert "There is no cluster 'tpu'" in capsys.readouterr().err
    assert tfpar(f"{command} --top 0") == 2
    assert "--top is 0" in capsys.readouterr().err


def test_the_best_are_shown_and_the_others_counted(folder, capsys):
    command = "estimate train.py:both --mesh 2,4,8 --cluster v100-ethernet --top 2"
    assert tfpar(command) == 0
    out = capsys.readouterr().out
    assert len(rows(out)) == 2 and out.endswith("\n1 more is not shown.\n")


@pytest.mark.parametrize(
    ("texts", "meshes"),
    [
        (["8,2x8"], [[8], [2, 8]]),
        (["8", "2x8", "8"], [[8], [2, 8]]),
        (["data=2,model=8,4"], [{"data": 2, "model": 8}, [4]]),
        (["4,data=2,model=8"], [[4], {"data": 2, "model": 8}]),
        (["data=2,model=8,data=16"], [{"data": 2, "model": 8}, {"data": 16}]),
        (["a=2", "b=4"], [{"a": 2}, {"b": 4}]),
    ],
)
def test_meshes_are_told_apart(texts, meshes):
    assert parse_meshes(texts) == [Mesh.of(mesh) for mesh in meshes]


def test_what_is_no_mesh_is_named():
    with pytest.raises(TfparError, match="--mesh '' is no mesh"):
        parse_meshes(["8,"])
