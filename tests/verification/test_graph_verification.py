"""Runs of a graph are judged as steps of a model are."""

from __future__ import annotations

import numpy as np
import pytest

from tfpar.graph_verification import Run, compare_runs
from tfpar.verification import Verdict

START = {"w": np.linspace(1, 2, 50, dtype="float32"), "name": np.array(b"net")}


def run(values, scale=1.0, bias=0.0):
    doubled = (values["w"] * np.float32(2 * scale)).astype("float32")
    return Run([{"loss": np.float32(doubled.sum() + bias)}], {**values, "w": doubled})


@pytest.mark.parametrize(
    ("arguments", "verdict", "told"),
    [
        ({"scale": 1 + 1e-6}, Verdict.EQUAL, "agrees"),
        ({"scale": 1.01}, Verdict.DIFFERS, "DIFFERS"),
        ({"bias": np.nan}, Verdict.DIFFERS, "DIFFERS"),
    ],
)
def test_a_run_is_held_against_moved_ones(arguments, verdict, told):
    report = compare_runs(START, run(START, **arguments), run)
    assert max((d.verdict for d in report.differences), key=lambda v: v.rank) is verdict
    assert report.ok is (verdict is not Verdict.DIFFERS) and told in str(report)


def test_what_is_not_finite_is_not_judged():
    report = compare_runs(START, run(START, bias=np.inf), lambda values: run(values, bias=np.inf))
    assert not report.ok and "not judged: not finite" in str(report)
    assert [d.name for d in report.differences if not d.ok] == ["loss"]
