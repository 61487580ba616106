"""Predictions of measured trials: a made-up file, and the published one if it is there."""

from __future__ import annotations

import copy
import json

import pytest

from benchmarks import published, three_d
from benchmarks.results import ROOT
from benchmarks.trials import read_trials
from tests.cases import some_first
from tfpar.planning.inter_op import LayerLayout
from tfpar.spec import TfparError

PUBLISHED = ROOT.parent / "shared" / "data" / "amp_trials.json"


def trial(tensor, data, cuts, measured, microbatch=1):
    return {
        "microbatch": microbatch,
        "tensor": tensor,
        "data": data,
        "pipeline": len(cuts) - 1,
        "cuts": cuts,
        "measured_s": measured,
    }


def made_up():
    """Two machines of two devices whose link is so slow that few may use it."""
    blocks = [0.001] * 30
    return {
        "settings": {
            "small": {
                "model": "gpt2",
                "cluster": {
                    "nodes": 2,
                    "devices_per_node": 2,
                    "inter_node_gbit_s": [1, 1],
                    "intra_node_gbit_s": [100, 50],
                    "layer_seconds": "node 0 gpt2_P3, node 1 gpt2_G4",
                },
                "global_batch": 4,
                "trials": [
                    trial(1, 4, [0, 30], 9.0),
                    trial(2, 1, [0, 15, 30], 1.0),
                    trial(1, 2, [0, 15, 30], 1.5),
                    trial(2, 2, [0, 30], 8.0),
                ],
            }
        },
        "forward_layer_seconds": {
            "gpt2_P3_1": blocks,
            "gpt2_G4_1": [2 * s for s in blocks],
            "gpt2_P3_2": [0.9 * s for s in blocks],
            "gpt2_G4_2": [1.2 * s for s in blocks],
        },
    }


def written(folder, known):
    path = folder / "trials.json"
    path.write_text(json.dumps(known), encoding="utf-8")
    return path


def test_a_file_of_trials_becomes_a_row_for_each_setting(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    path = written(tmp_path, made_up())
    monkeypatch.setattr("sys.argv", ["three_d", "--trials", str(path), "--json", str(out)])
    assert three_d.main() == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["setting"] == "small" and row["trials"] == 4
    assert row["rho"] == pytest.approx(0.8)
    best = {"tensor": 1, "data": 2, "pipeline": 2, "microbatch": 1, "cuts": [0, 15, 30]}
    assert row["first_choice"] == best and row["measured_over_best"] == pytest.approx(1.5)
    assert "small: 4 trials, rho 0.800" in capsys.readouterr().out


def test_time_grows_with_the_microbatch_by_the_work_alone(tmp_path):
    """At degree 2 half of the work remains; what was measured above that starts a microbatch."""
    known = made_up()
    known["settings"]["small"]["trials"] += [trial(2, 1, [0, 15, 30], 1.0, 4)]
    (setting,) = read_trials(written(tmp_path, known))
    passes = {
        (name, size): setting.model.table.passes("layer 0", name, LayerLayout(1, 2, size))
        for name in ("gpt2_P3", "gpt2_G4")
        for size in (1, 4)
    }
    # Memory that is 320 / 900 as fast lets expect 0.002 * 320 / 900 of the V100.
    work = 0.002 * 320 / 900 / 2
    assert passes["gpt2_P3", 1].forward == pytest.approx(0.0009)
    assert passes["gpt2_P3", 4].forward == pytest.approx(0.0009 + 3 * work)
    assert passes["gpt2_G4", 4].forward == pytest.approx(0.0012 + 3 * 0.001)
    assert all(found.backward == 2 * found.forward for found in passes.values())


def spoiled(where, value):
    """The made-up file with one entry changed; None: without it."""
    known = copy.deepcopy(made_up())
    at = known
    for key in where[:-1]:
        at = at[key]
    if value is None:
        del at[where[-1]]
    else:
        at[where[-1]] = value
    return known


SMALL = ("settings", "small")
FIRST = (*SMALL, "trials", 0)


@pytest.mark.parametrize(
    "where, value, message",
    [
        (("settings",), None, "`settings` is missing"),
        (("settings",), [], r"`settings` is \[\], not a table"),
        ((*SMALL, "model"), "bert", "`settings.small.model` is 'bert'; known are gpt2, transgan"),
        ((*SMALL, "global_batch"), 0, "`settings.small.global_batch` is 0, not a whole number"),
        ((*SMALL, "trials"), None, "`settings.small.trials` is missing"),
        ((*SMALL, "cluster", "nodes"), "two", "cluster.nodes` is 'two', not a whole number"),
        ((*SMALL, "cluster", "inter_node_gbit_s"), [1], r"has 1 of 2 nodes"),
        (
            (*SMALL, "cluster", "inter_node_gbit_s"),
            [1, 0],
            r"gbit_s\[1\]` is 0, not a number above",
        ),
        ((*SMALL, "cluster", "layer_seconds"), "node 0 gpt2_P3", "layer_seconds` is 'node 0"),
        ((*SMALL, "cluster", "layer_seconds"), "gpt2_K80", "names 'gpt2_K80', of which there are"),
        (("forward_layer_seconds", "gpt2_P3_2"), None, "`forward_layer_seconds.gpt2_P3_2` is miss"),
        (("forward_layer_seconds", "gpt2_P3_2"), [1.0], "has 1 layers; the model has 30"),
        ((*FIRST, "measured_s"), None, r"trials\[0\].measured_s` is missing"),
        ((*FIRST, "measured_s"), -1, r"trials\[0\].measured_s` is -1, not a number above 0"),
        ((*FIRST, "cuts"), [0, 31], r"cuts` is \[0, 31\]; 1 stages of 30 layers need 2 rising"),
        ((*FIRST, "tensor"), 2, r"trials\[0\]` is 2 tensor x 4 data x 1 stages; the cluster has 4"),
        ((*FIRST, "microbatch"), 3, r"microbatch` is 3: 4 copies do not divide 4 evenly"),
        (FIRST, 7, r"`settings.small.trials\[0\]` is not a table"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_key(tmp_path, where, value, message):
    path = written(tmp_path, spoiled(where, value))
    with pytest.raises(TfparError, match=message) as caught:
        read_trials(path)
    assert str(caught.value).startswith(str(path))


def test_what_is_no_json_is_refused(tmp_path, monkeypatch, capsys):
    path = tmp_path / "trials.json"
    path.write_text("{", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["three_d", "--trials", str(path)])
    assert three_d.main() == 2
    assert "Cannot read the trials" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "at_least"),
    some_first([("homogeneous", 1.0)], [("heterogeneous, microbatch 1", 1.5)]),
)
def test_the_search_is_as_fast_as_megatron_and_faster_on_unlike_machines(setup, at_least):
    rows = {row["system"]: row for row in three_d.searched(setup)}
    assert rows["search"]["speedup"] >= at_least
    assert rows["annealing"]["speedup"] >= at_least


def test_alpa_s_measured_run_is_predicted():
    row = published.predicted(published.RUNS[0])
    assert row["published_s"] == pytest.approx(2.464, rel=1e-3)
    assert 0.85 <= row["ratio"] <= 1.15
    assert 0.85 <= row["predicted_bytes"] / row["published_bytes"] <= 1.15


@pytest.mark.slow
def test_megatron_s_measured_run_is_predicted():
    row = published.predicted(published.RUNS[1])
    assert row["published_s"] == pytest.approx(31.5, rel=2e-3)
    assert 0.85 <= row["ratio"] <= 1.15
    assert row["predicted_bytes"] < 80e9


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published trials are not here")
def test_the_published_trials_are_predicted():
    rows = {setting.name: three_d.compare(setting) for setting in read_trials(PUBLISHED)}
    assert rows["homogeneous"]["rho"] >= 0.95
    assert rows["het_model"]["rho"] >= 0.85
    assert rows["het_cluster"]["rho"] >= 0.6
    assert all(row["measured_over_best"] <= 1.05 for row in rows.values())
