"""`--constraints`: constraints from a file, for the commands that plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.train import tfpar
from tfpar.plans import Plan

ROOT = Path(__file__).parents[2]
HINTS = '[[shard]]\npattern = "fc1/kernel"\ndim = 1\naxis = "model"\n'
COMMAND = "train.py:both --cluster v100-ethernet --constraints hints.toml"


def laid(path: str) -> dict[str, str]:
    """The specs of a plan's kernels."""
    variables = json.loads(Path(path).read_text())["variables"]
    return {name: v["spec"] for name, v in variables.items() if name.endswith("kernel")}


def test_a_plan_keeps_to_them(folder, capsys):
    Path("hints.toml").write_text(HINTS)
    assert tfpar(f"plan {COMMAND} --mesh data=2,model=2 -o p.json --quiet") == 0
    plan = Plan.load("p.json")
    assert plan.constraints == ("shard('fc1/kernel', dim=1, axis='model')",)
    assert laid("p.json")["mlp/fc1/kernel"] == "R,S(1)"
    Path("hints.toml").write_text('[[keep]]\nplan = "p.json"\npattern = "fc1"\n')
    assert tfpar(f"plan {COMMAND} --mesh data=4,model=2 -o q.json --quiet") == 0
    assert laid("q.json")["mlp/fc1/kernel"] == "R,S(1)"
    assert Plan.load("q.json").batch_axes == plan.batch_axes == ("data",)


def test_stages_can_be_given(folder, capsys):
    Path("hints.toml").write_text('[[stage]]\npattern = "fc1"\nindex = 1\n')
    stages = "--mesh 2 --stages 2 --microbatches 2"
    assert tfpar(f"plan {COMMAND} {stages} -o p.json --quiet") == 0
    assert Plan.load("p.json").stages.owners["mlp/fc1/kernel"] == 1
    assert tfpar(f"plan {COMMAND} --mesh 2") == 2
    assert "there is no pipeline of several stages" in capsys.readouterr().err


def test_meshes_without_the_axes_are_passed_over_by_estimates(folder, capsys):
    Path("hints.toml").write_text(HINTS)
    assert tfpar(f"estimate {COMMAND} --mesh 4,2x2 --json") == 0
    found, other = json.loads(capsys.readouterr().out)["estimates"]
    assert found["fits"] and found["mesh"] == "data=2 x model=2"
    assert not other["fits"] and "the mesh has no axis 'model'" in other["why"]
    assert tfpar(f"estimate {COMMAND} --mesh 4,8") == 2
    assert "the mesh has no axis 'model'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[shards]]\n", "hints.toml: the constraint 'shards' is not known"),
        (
            HINTS.replace("dim", "dims"),
            r"hints.toml: \[\[shard\]\]: dims is not known \(did you mean dim",
        ),
        (HINTS.replace("fc1", "fc9"), r"shard\('fc9/kernel', .* matches no variable"),
    ],
)
def test_what_is_wrong_is_named(folder, capsys, text, told):
    Path("hints.toml").write_text(text)
    script = "broken.py:build --batch-size 8" if "fc9" not in text else "train.py:both"
    assert tfpar(f"plan {script} --mesh 2x2 --constraints hints.toml") == 2
    assert re.search(told, capsys.readouterr().err)


@pytest.mark.slow
def test_the_page_s_commands_do_what_it_says(folder, capsys):
    def blocks(page: str, kind: str) -> list[str]:
        text = (ROOT / "docs/howto" / page).read_text("utf-8")
        return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)

    Path("train.py").write_text(blocks("plan_without_devices.md", "python")[0])
    hints, kept = blocks("constrain_a_plan.md", "toml")
    Path("hints.toml").write_text(hints)
    first, second = blocks("constrain_a_plan.md", "bash")[0].splitlines()
    assert tfpar(first.removeprefix("tfpar ")) == 0
    assert laid("plan.json")["classifier/features/kernel"] == "R,S(1)"
    assert tfpar(second.removeprefix("tfpar ")) == 0
    Path("hints.toml").write_text(kept)
    assert tfpar(first.removeprefix("tfpar ").replace("-o plan.json", "-o new.json")) == 0
    assert laid("new.json")["classifier/classes/kernel"] == "R,S(1)"
