"""`tfpar show` and `tfpar diff`: plans in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.train import tfpar
from tfpar.plans import Plan


@pytest.fixture
def saved(folder, capsys):
    assert tfpar("plan train.py:both --mesh 2 --quiet -o a.json") == 0
    data = json.loads(Path("a.json").read_text())
    fc1, fc2 = (data["variables"][f"mlp/{n}/kernel"] for n in ("fc1", "fc2"))
    fc1["spec"] = "S(1)" + ",R" * (len(data["mesh"]) - 1)
    fc2["spec"] = "S(0)" + ",R" * (len(data["mesh"]) - 1)
    Path("b.json").write_text(json.dumps(data))


def test_diff(saved, capsys):
    assert tfpar("diff a.json a.json") == 0
    assert capsys.readouterr().out == ""
    assert tfpar("diff a.json b.json") == 1
    assert capsys.readouterr().out.count("/kernel: ") == 2
    assert tfpar("diff a.json c.json") == 2
    assert capsys.readouterr().err.startswith("tfpar diff: There is no plan file 'c.json'.")
    assert tfpar("diff a.json train.py") == 2
    assert "corrupt" in capsys.readouterr().err


def test_show(saved, capsys):
    assert tfpar("show a.json") == 0
    assert capsys.readouterr().out == Plan.load("a.json").summary() + "\n"
    assert tfpar("show a.json --explain fc1/kernel --explain fc1/bias") == 0
    out = capsys.readouterr().out
    assert "Variable 'mlp/fc1/kernel'" in out and "Variable 'mlp/fc1/bias'" in out
    assert tfpar("show a.json --explain fc9") == 2
    assert capsys.readouterr().err.startswith("tfpar show: The plan has no variable or layer 'fc9'")


def test_explain(saved, capsys):
    assert tfpar("explain a.json fc1/kernel fc2") == 0
    out = capsys.readouterr().out
    assert (
        "Variable 'mlp/fc1/kernel'" in out and "Layer 'mlp/fc2' (Dense), made in train.py:" in out
    )
    assert tfpar("explain a.json fc1/kernel fc2 --json") == 0
    variable, layer = json.loads(capsys.readouterr().out)
    assert variable["variable"]["path"] == "mlp/fc1/kernel"
    assert layer["layer"]["class_name"] == "Dense" and len(layer["variables"]) == 2
    assert tfpar("explain a.json nothing") == 2
    assert "no variable or layer 'nothing'" in capsys.readouterr().err


def test_all_that_is_shown_is_there_as_json(saved, capsys):
    assert tfpar("show a.json --json") == 0
    assert json.loads(capsys.readouterr().out) == Plan.load("a.json").report_data()
    assert tfpar("show a.json --full --sort memory") == 0
    assert "Inputs of the step" in capsys.readouterr().out
    assert tfpar("diff a.json b.json --json") == 1
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_a_report_of_another_version_is_refused(saved, capsys):
    data = json.loads(Path("a.json").read_text())
    data["report"]["version"] = 9
    Path("c.json").write_text(json.dumps(data))
    for command in ("show c.json", "explain c.json fc1", "compare a.json c.json"):
        assert tfpar(command) == 2
        assert "has the version 9; this tfpar reads 1" in capsys.readouterr().err


@pytest.mark.slow
def test_what_other_machines_would_take_is_kept_with_the_plan(folder, capsys):
    asked = "--what-if dgx-a100:4 v100-ethernet:2x2"
    assert tfpar(f"plan train.py:both --mesh 2 --cluster dgx-a100 --quiet {asked} -o d.json") == 0
    first, second = Plan.load("d.json").report_data()["what_if"]
    assert (first["cluster"], first["ranks"]) == ("dgx-a100", 4) and first["fits"]
    assert second["mesh"] == "data=2 x model=2" and second["seconds"] > 0
    assert tfpar("plan train.py:both --mesh 2 --what-if nowhere:2 -o d.json") == 2
    assert "nowhere" in capsys.readouterr().err
