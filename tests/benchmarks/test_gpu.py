"""The run on one GPU: what it does with little time and with what fails, and that its cases run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types

import pytest

from benchmarks import gpu
from benchmarks.gpu import CASES, LARGE, SMALL


def told(monkeypatch, tmp_path, *arguments):
    path = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", [gpu.__file__, "--json", str(path), *arguments])
    gpu.main()
    return {row["case"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def test_what_fails_or_has_no_time_left_is_a_row(monkeypatch, tmp_path):
    def run(command, **options):
        name = command[command.index("--only") + 1]
        if name == "large":
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(
            command, name == "floor", "words\n" + json.dumps({"step_s": 0.5}), "out of memory"
        )

    fake = types.SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(gpu, "subprocess", fake)
    named = ["floor", "large keras", "large"]
    rows = told(monkeypatch, tmp_path, *(word for name in named for word in ("--case", name)))
    assert [*rows] == named
    assert rows["floor"]["error"] == "out of memory"
    assert rows["large keras"]["step_s"] == 0.5
    assert rows["large"]["error"].startswith("took longer than")
    (row,) = told(monkeypatch, tmp_path, "--case", "large", "--minutes", "0.5").values()
    assert row["error"] == "no time was left"


def test_all_cases_fit_into_eight_minutes():
    assert sum(case.about_s for case in CASES) < 8 * 60
    assert {case.size for case in CASES} == {None, LARGE, SMALL}


def test_flops_are_those_of_the_formula():
    weights = 5 * 12 * 4096**2 + 32_000 * 4096
    assert weights == pytest.approx(1.14e9, rel=0.01)
    assert LARGE.flops == pytest.approx(6 * weights * 16_384 * (1 + 0.036), rel=0.01)
    assert dataclasses.replace(LARGE, batch=32).flops == 2 * LARGE.flops


@pytest.mark.nightly
def test_every_case_runs_on_tiny_models(monkeypatch, tmp_path):
    rows = told(monkeypatch, tmp_path, "--tiny", "--minutes", "15")
    assert [row["case"] for row in rows.values() if "error" in row] == []
    assert rows["floor"]["launch_s"] > 0 and rows["large"]["step_s"] > 0
