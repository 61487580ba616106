"""`tfpar verify`: a script's model on a mesh against one device."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.train import SCRIPT, tfpar
from tests.observability.verification.planted import drops_sums
from tests.observability.verification.test_planted_errors import planted_rule

BY_BATCH = '[batch]\naxes = ["data"]\n'
TOKENS = """

def reads_tokens():
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), keras.layers.Embedding(3, 2), keras.layers.Flatten()]
    )
    model.compile("sgd", "mse", jit_compile=False)
    return model


def reads_text():
    return build(), (tf.TensorSpec((8, 6), tf.string), tf.TensorSpec((8,), "int32"))
"""


@pytest.mark.slow
def test_what_trains_alike_is_said_to(folder, capsys):
    command = "verify train.py:both --mesh 2 --steps 2"
    assert tfpar(command) == 0
    out = capsys.readouterr().out
    assert out.startswith("losses\n  step 0: one device ") and "| mlp/fc1/kernel " in out
    assert re.search(r"\d+ variables: .*equal", out) and "DIFFERS" not in out
    assert tfpar("plan train.py:both --mesh 2 --microbatches 2 --quiet -o p.json") == 0
    assert tfpar("verify train.py:both --plan p.json --steps 1 --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["equal"], len(found["losses"])) == (1, True, 1)
    kernel = next(v for v in found["variables"] if v["name"] == "mlp/fc1/kernel")
    assert kernel["verdict"] in ("equal", "rounding") and kernel["gradient_error"] < 1e-5
    counter = next(v for v in found["variables"] if v["name"].endswith("/iteration"))
    assert counter["gradient_error"] is None and counter["update_error"] == 0


@pytest.mark.slow
def test_what_differs_is_named(folder, capsys):
    Path("hints.toml").write_text(BY_BATCH)
    command = "verify train.py:build --batch-size 8 --mesh 2 --constraints hints.toml --steps 1"
    assert tfpar(command) == 0  # with numbers that are drawn
    capsys.readouterr()
    with planted_rule("MatMul", drops_sums):
        assert tfpar(command) == 1
        assert "Unexplained difference, largest at " in capsys.readouterr().out
        assert tfpar(f"{command} --json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"] and found["variables"][0]["verdict"] == "DIFFERS"


@pytest.mark.slow
def test_token_ids_are_drawn_that_every_vocabulary_has(folder, capsys):
    Path("train.py").write_text(SCRIPT + TOKENS)
    assert tfpar("verify train.py:reads_tokens --batch-size 4 --mesh 2 --steps 1") == 0


WRONG = {
    "train.py:both": "one of the arguments --mesh --plan is required",
    "train.py:both --mesh 2 --plan p.json": "not allowed with argument",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_it_wants_a_mesh_or_a_plan(folder, capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        tfpar(f"verify {arguments}")
    assert exit_.value.code == 2 and WRONG[arguments] in capsys.readouterr().err


REFUSED = {
    "train.py:both --mesh 2 --steps 0": "--steps is 0",
    "train.py:both --plan no.json": "There is no plan file 'no.json'",
    "train.py:build --mesh 2": "No batch to plan for",
    "train.py:build --mesh 2 --batch-size 0": "--batch-size is 0",
    "train.py:reads_text --mesh 2": "There are no values to verify with for .*string.* Give arrays",
    "train.py:not_compiled --mesh 2 --batch-size 8": "that is not compiled",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_tried_is_refused_and_no_block_left_open(folder, capsys, arguments):
    from tfpar.scopes import enclosing

    Path("train.py").write_text(SCRIPT + TOKENS)
    assert tfpar(f"verify {arguments}") == 2
    out, err = capsys.readouterr()
    assert out == "" and re.search(f"^tfpar verify: .*{REFUSED[arguments]}", err), err
    assert enclosing() is None
