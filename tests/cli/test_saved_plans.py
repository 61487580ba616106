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
