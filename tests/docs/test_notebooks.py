"""Notebooks run, and show what is saved with them."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cases import at_night
from tests.time_limits import time_limit

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
MOST_BYTES = 300_000

MODELS = {"first_plan": "classifier", "gpt_on_four_ranks": "gpt"}
"""The name of the model of each notebook."""

Output = dict[str, Any]


def outputs(book: dict[str, Any]) -> list[list[Output]]:
    """What each cell of code printed and showed, without the lines of progress that are gone."""
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    return [[o for o in cell["outputs"] if any(o.get("data", o).values())] for cell in cells]


def data(output: Output, kind: str) -> str:
    """The text of an output, of a kind (`stdout`, `text/html`); nbformat has it in lines."""
    if output["output_type"] == "stream":
        return "".join(output["text"]) if output["name"] == kind else ""
    return "".join(output.get("data", {}).get(kind, ""))


def check_outputs(name: str, cells: list[list[Output]]) -> None:
    """Check that outputs hold what the text of the notebook says of them."""
    found = [output for cell in cells for output in cell]
    assert all(output["output_type"] != "error" for output in found)
    for output in found:
        text = data(output, "stdout") + data(output, "stderr")
        assert not re.search(r"[\b\r]", text), "a progress bar is one line, as it was last"
        assert text.count("\n") <= 60
    (trained,) = (t for o in found if "Epoch 1/" in (t := data(o, "stdout")))
    assert re.search(r"^tfpar: .* planner in .* predicted .* a step", trained, re.MULTILINE)
    assert re.search(r"━ *\S*\S*.* \S*\d+\w?s\S* .*loss: \d", trained)
    (summary,) = (html.unescape(t) for o in found if (t := data(o, "text/html"))[:4] == "<pre")
    assert f"Plan for '{MODELS[name]}' on mesh " in summary and "Predicted: " in summary
    assert "| Layer (class)" in summary and "| Together" in summary
    (page,) = (t for o in found if (t := data(o, "text/html")).startswith("<iframe"))
    assert f"<title>{MODELS[name]} " in page and "Content-Security-Policy" in page
    if name == "first_plan":
        texts = "".join(data(o, "stdout") for o in found)
        assert re.search(r"^Variable 'classifier/classes/kernel', float32", texts, re.MULTILINE)
        losses = re.findall(r"epoch \d: loss (\S+) on four ranks, (\S+) on one device", texts)
        assert len(losses) == 3
        for ours, theirs in losses:
            assert float(ours) == pytest.approx(float(theirs), rel=1e-2, abs=1e-3)
    else:
        (picture,) = filter(None, (data(o, "image/svg+xml") for o in found))
        assert "step 11: " in picture and "rank 3, compute" in picture


def test_every_notebook_is_saved_with_its_outputs():
    assert sorted(path.stem for path in FOLDER.glob("*")) == sorted(MODELS)
    for name in MODELS:
        text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
        assert len(text.encode()) <= MOST_BYTES, "python -m scripts.notebooks"
        book = json.loads(text)
        code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        check_outputs(name, outputs(book))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_plan", *at_night("gpt_on_four_ranks")])
def test_a_notebook_runs_and_shows_what_is_saved(name, tmp_path):
    for needed in ("nbclient", "ipykernel"):
        pytest.importorskip(needed, reason=f"needs {needed}: pip install 'tfpar[dev]'")
    from scripts.notebooks import run_notebook

    found = outputs(run_notebook(name, str(tmp_path), time_limit(200)))
    check_outputs(name, found)
    saved = outputs(json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")))

    def kinds(cells: list[list[Output]]) -> list[list[list[str]]]:
        return [[sorted(o.get("data", [o.get("name")])) for o in cell] for cell in cells]

    assert kinds(found) == kinds(saved), f"python -m scripts.notebooks {name}"
