"""Constraints from a file: the same as from Python, and errors that say where they are."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tests.plan.graphs import mlp
from tfpar.constraints import batch, fsdp, replicate, shard, shard_output, stage
from tfpar.hints import read_hints
from tfpar.plans import keep, plan_from_constraints
from tfpar.spec import Mesh, TfparError

EVERYTHING = """
[[shard]]
pattern = "fc1/kernel"
dim = 1
axis = "model"

[[shard]]
pattern = "fc2/kernel"
dim = -2
axis = "model"
stride = 2

[replicate]
pattern = "head/.*"

[[fsdp]]
axis = "data"
pattern = "fc2/kernel"
stage = 2

[[shard_output]]
pattern = "mlp/block_0/fc1"
dim = 1
axis = "model"

[[shard_output]]
pattern = "mlp/head"
axis = "model"

[batch]
axes = ["data"]

[[stage]]
pattern = "head"
index = 1
"""


@pytest.fixture
def hints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(text):
        Path("hints.toml").write_text(text)
        return read_hints("hints.toml")

    return read


def test_tables_say_what_python_says(hints):
    assert hints(EVERYTHING) == (
        shard("fc1/kernel", 1, "model"),
        shard("fc2/kernel", -2, "model", 2),
        replicate("head/.*"),
        fsdp("data", "fc2/kernel", stage=2),
        shard_output("mlp/block_0/fc1", 1, "model"),
        shard_output("mlp/head", None, "model"),
        batch("data"),
        stage("head", 1),
    )
    assert hints("batch = { axes = [] }") == (batch(),)
    assert hints("") == ()


def test_what_a_plan_does_is_kept_by_its_path_from_the_file(tmp_path, hints):
    mesh = Mesh.of({"data": 2, "model": 2})
    old = plan_from_constraints(mlp(), mesh, [shard("fc1/kernel", 1, "model")])
    (tmp_path / "plans").mkdir()
    old.save(tmp_path / "plans" / "p.json")
    Path("plans/hints.toml").write_text('[[keep]]\nplan = "p.json"\npattern = "block_0"\n')
    found = read_hints("plans/hints.toml")
    assert [str(c) for c in found[:-1]] == [str(c) for c in keep(old, "block_0")[:-1]]


WRONG = {
    "shard = 3": r"hints.toml: \[\[shard\]\] is no table",
    '[[shards]]\npattern = "x"': r"constraint 'shards' is not known \(did you mean shard",
    '[[shard]]\nvariable = "x"': "variable is not known; there are pattern, dim, axis, stride",
    '[[shard]]\npattern = "x"\ndim = 0': r"\[\[shard\]\]: axis is missing",
    '[[shard]]\npattern = "x"\ndim = "0"\naxis = "a"': r"\[\[shard\]\]: .*: dim is '0'; it must be",
    '[[shard]]\npattern = "("\ndim = 0\naxis = "a"': "not a regular expression",
    '[[replicate]]\npattern = "x"\n[[replicate]]\npattern = 3': r"replicate\]\] 2: .* is 3",
    '[batch]\naxes = "data"': "axes is 'data'; it must be a list",
    "[batch]": "axes is missing; it must be a list",
    "[batch]\naxes = [1]": "an axis is 1",
    '[[keep]]\nplan = "no.json"\npattern = "x"': r"\[\[keep\]\]: There is no plan file 'no.json'",
    "[[shard]\n": "Cannot read the constraints file 'hints.toml'",
}


@pytest.mark.parametrize("text", WRONG)
def test_errors_name_file_table_and_key(text, hints):
    with pytest.raises(TfparError, match=WRONG[text]) as error:
        hints(text)
    assert "hints.toml" in str(error.value)


def test_a_file_that_is_not_there():
    with pytest.raises(TfparError, match=re.escape("Cannot read the constraints file 'no.toml'")):
        read_hints("no.toml")


def test_keys_are_the_arguments_of_the_functions():
    """What is written down is what is documented: a renamed argument would rename a key."""
    names = {f.__name__: [*inspect.signature(f).parameters] for f in (shard, stage, keep)}
    assert names == {
        "shard": ["pattern", "dim", "axis", "stride"],
        "stage": ["pattern", "index"],
        "keep": ["plan", "pattern"],
    }
