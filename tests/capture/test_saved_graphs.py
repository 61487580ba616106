"""The steps in `tests/graphs` are those that today's capture gives."""

from __future__ import annotations

import pytest

from scripts.save_graphs import captured, versions
from tests.graphs import saved, saved_names, saved_text
from tests.graphs.models import MODELS
from tfpar.ir.text import format_step

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", saved_names())
def test_a_saved_graph_is_what_is_captured_today(name):
    if versions() not in saved_text(name).split("\n", 1)[0]:
        pytest.skip("saved with another TensorFlow or Keras, whose graphs may differ")
    assert format_step(captured(name)) == format_step(saved(name)), (
        "if the change is meant: python -m scripts.save_graphs"
    )


def test_every_model_is_saved_and_every_step_has_a_model():
    assert saved_names() == sorted(MODELS)
