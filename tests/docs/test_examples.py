"""Examples run, train what one device trains, and find the plans that their page shows."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from scripts.example_page import NAMES, PAGE, ROOT, output, part, plans, versions
from tests.cases import at_night

BY_DAY = ("custom_train_step", "tf1_script")
"""Besides the quickstart, which `tests.docs.test_docs` runs."""
MODULES = {"shipped_data", "machines"}  # which examples import
_LOSSES = re.compile(r"^(.*loss.*?): +([\d. ]+)$", re.MULTILINE)


def shown() -> dict[str, str]:
    """The parts of the page."""
    found = re.findall(
        r"<!-- example (\w+) -->\n(.*?)<!-- end example -->", PAGE.read_text("utf-8"), re.DOTALL
    )
    return dict(found)


def test_every_example_is_on_the_page_with_its_plan():
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py")} - MODULES
    assert scripts == set(NAMES) == set(shown())
    for name, text in shown().items():
        assert plans(text), name
        assert part(name, "").partition("finds")[0] in text, "python -m scripts.example_page"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BY_DAY, *at_night(*sorted({*NAMES} - {"quickstart", *BY_DAY}))])
def test_an_example_trains_with_the_plan_of_its_page(name):
    if not any(importlib.metadata.distributions(name="scikit-learn")):
        pytest.skip("needs scikit-learn")  # which tests cannot import, but what they start can
    printed = output(name)
    if versions() in shown()[name]:  # others trace other ops, of which another plan may be best
        assert plans(printed) == plans(shown()[name]), f"python -m scripts.example_page {name}"
    losses = {label: [float(n) for n in row.split()] for label, row in _LOSSES.findall(printed)}
    assert losses
    for label, row in losses.items():
        alone = losses.get(label.replace("on the mesh", "on one device"), row)
        assert row == pytest.approx(alone, rel=1e-2), label
        if label.startswith("losses"):
            assert row[-1] < row[0], label
