"""The steps in `tests/graphs` are those that today's capture gives."""

from __future__ import annotations

import re

import pytest

from scripts.save_graphs import captured, versions
from tests.cases import at_night
from tests.graphs import saved, saved_names, saved_text
from tests.graphs.models import MODELS
from tfpar.ir import StepGraph, format_step

pytestmark = pytest.mark.slow

BY_DAY = ("convnet", "embedded", "frozen", "gpt_mixed", "gpt_one_layer", "mlp", "recurrent")
"""Names of steps that differ in what is captured; the others differ in sizes."""


def described(step: StepGraph) -> list[str]:
    """The lines of its text. Bodies of loops are numbered by how many functions were traced before
    them, and stand in the order of their names: so numbers and order are left out of those."""
    lines = format_step(step).splitlines()
    if not step.graph.functions:
        return lines
    return sorted(re.sub(r"_\d{3,}", "_#", line) for line in lines)


@pytest.mark.parametrize("name", [*BY_DAY, *at_night(*sorted({*saved_names()} - {*BY_DAY}))])
def test_a_saved_graph_is_what_is_captured_today(name):
    if versions() not in saved_text(name).split("\n", 1)[0]:
        pytest.skip("saved with another TensorFlow or Keras, whose graphs may differ")
    today, before = (described(step) for step in (captured(name), saved(name)))
    assert today == before, "if the change is meant: python -m scripts.save_graphs"


def test_every_model_is_saved_and_every_step_has_a_model():
    assert saved_names() == sorted(MODELS)
