"""`tfpar compare`: two plans beside each other."""

from __future__ import annotations

import json

import pytest

from tests.cli.train import tfpar

pytestmark = pytest.mark.slow


@pytest.fixture
def saved(folder, capsys):
    with open("hints.toml", "w") as file:
        file.write('[[shard]]\npattern = "fc1/kernel"\ndim = 1\naxis = "model"\n')
    mesh = "--mesh data=1,model=2 --cluster v100-ethernet --quiet"
    assert tfpar(f"plan train.py:both {mesh} -o a.json") == 0
    assert tfpar(f"plan train.py:both {mesh} --constraints hints.toml -o b.json") == 0
    capsys.readouterr()


def test_two_plans_are_put_beside_each_other(saved, capsys):
    assert tfpar("compare a.json b.json") == 0
    out = capsys.readouterr().out
    assert "| step, predicted" in out and "second / first" in out
    assert "| mlp/fc1 | replicated | S(1) over model" in out
    assert tfpar("compare a.json a.json") == 0
    assert "All layers lie alike." in capsys.readouterr().out
    assert tfpar("compare a.json b.json --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 1 and found["placements"][0]["name"] == "mlp/fc1"
    both = {one["name"]: (one["first"], one["second"]) for one in found["figures"]}
    assert both["ranks"] == (2, 2) and both["step, predicted"][0] < both["step, predicted"][1]


def test_both_are_measured_on_the_model(saved, capsys):
    assert tfpar("compare a.json b.json --measure train.py:both --steps 2 --json") == 0
    first = json.loads(capsys.readouterr().out)["figures"][0]
    assert first["name"] == "step, measured" and first["first"] > 0 and first["second"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("a.json c.json", "There is no plan file 'c.json'"),
        ("a.json b.json --steps 0", "--steps is 0"),
        ("a.json b.json --batch-size 8", "are for --measure"),
        ("a.json b.json --measure train.py:no_model", "returned a int"),
    ],
)
def test_bad_input_is_named(saved, capsys, arguments, said):
    assert tfpar(f"compare {arguments}") == 2
    assert said in capsys.readouterr().err
