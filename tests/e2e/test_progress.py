"""What takes long before the first step, and beside training, is told by one reporter."""

from __future__ import annotations

import re
import types

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.observability.report.test_progress import quick  # noqa: F401 - a fixture
from tfpar import progress

X, Y = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")


@pytest.fixture
def told(monkeypatch, quick, capsys):  # noqa: F811
    """Gives what was shown, even of what is quick."""
    monkeypatch.setattr(progress.LogDisplay, "every_s", 0.0)
    return lambda: capsys.readouterr().err


def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="fc")])
    model.compile("sgd", "mse", jit_compile=False)
    return model


def of(text: str) -> list[str]:
    """What was told of, each once, in its order."""
    return list(dict.fromkeys(re.findall(r"^tfpar: ([a-z ]+): ", text, re.MULTILINE)))


def fit(**options):
    with tap.auto_parallel([2], cluster="v100-ethernet", planner="tap", **options):
        model = build()
    model.fit(X, Y, batch_size=8, verbose=0)


def test_all_that_precedes_a_first_step_is_told(told):
    fit()
    text = told()
    assert of(text) == ["tracing the train step", "searching a plan", "compiling the train step"]
    assert "compiling the train step: past 'propagate'" in text


def test_those_who_ask_for_no_lines_and_other_ranks_get_none(told):
    fit(verbose=0)
    assert told() == ""
    with tap.auto_parallel([2]) as session:
        assert session.tells
        session.ranks = types.SimpleNamespace(world=types.SimpleNamespace(rank=1))
        assert not session.tells


def test_planning_ahead_is_told(told):
    tap.plan(build, (X, Y), [2], "v100-ethernet", planner="tap")
    assert of(told()) == ["tracing the train step", "searching a plan"]


@pytest.mark.nightly
def test_calibration_says_what_is_left_of_its_budget(told):
    tap.calibrate([2], budget_s=0.5)
    text = told()
    assert re.search(r"^tfpar: measuring: collectives of .*, \d+ s, 0 s left$", text, re.MULTILINE)
    assert of(text) == ["measuring"]
