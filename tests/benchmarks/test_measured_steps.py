"""Steps that others measured: a made-up table, and rows that constants were fitted to."""

from __future__ import annotations

import csv
import dataclasses
import json
import statistics
import sys

import pytest

from benchmarks import measured_steps, published
from benchmarks.measured_steps import CONSTANTS, FITTED, MeasuredStep, score, scored

STEP = MeasuredStep(8, 16, 1, 1024, 16, 12, 1024, 1, 8, 1, 100.0)


@pytest.fixture(scope="module")
def fitted():
    return MeasuredStep.read(FITTED)


def test_a_host_is_the_floor_of_small_steps():
    """Of 12 blocks and 2 microbatches; of larger microbatches devices are."""
    wait_free = CONSTANTS._replace(dispatch_s=0.0, microbatch_s=0.0)
    ops = 4 * measured_steps.OPS * CONSTANTS.dispatch_s
    assert STEP.predicted_s() > 2 * 12 * ops > 2 * STEP.predicted_s(wait_free) / 3
    large = dataclasses.replace(STEP, micro_batch=8, global_batch=128)
    assert large.predicted_s() / large.predicted_s(wait_free) < 1.15


def test_what_constants_are_fitted_to_is_predicted_and_not_scored(fitted):
    few = fitted[::6]
    errors = [abs(step.predicted_s() / step.seconds - 1) for step in few]
    assert statistics.mean(errors) < 0.12
    assert scored(few) == []
    (row,) = scored([few[0], STEP])
    assert (row["gpus"], row["predicted_ms"]) == (8, pytest.approx(1e3 * STEP.predicted_s()))


def test_scores_are_those_of_each_model_and_batch():
    row = dataclasses.asdict(STEP)
    rows = [
        row | {"predicted_ms": 110.0},
        row | {"data": 4, "tensor": 2, "measured_ms": 80.0, "predicted_ms": 120.0},
        row | {"layers": 24, "predicted_ms": 100.0},
        row | {"gpus": 16, "data": 16, "measured_ms": 50.0, "predicted_ms": 25.0},
    ]
    whole, one, several = score(rows)
    assert (whole["number"], one["number"], several["number"]) == (4, 3, 1)
    assert whole["mean_error"] == pytest.approx((0.1 + 0.5 + 0.0 + 0.5) / 4)
    assert one["within_15_percent"] == pytest.approx(2 / 3)
    assert (one["choices"], one["chosen_mean"], one["chosen_worst"]) == (1, 1.25, 1.25)
    assert several["choices"] == 0 and several["rho"] is None
    assert "chosen" not in measured_steps.score_text(several)
    assert "1.250 times the fastest" in measured_steps.score_text(one)


def test_the_command_prices_a_table(tmp_path, monkeypatch, capsys):
    table, found, told = (str(tmp_path / name) for name in ("steps.csv", "found.json", "told.csv"))
    with open(table, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, dataclasses.asdict(STEP))
        writer.writeheader()
        writer.writerows(dataclasses.asdict(dataclasses.replace(STEP, layers=n)) for n in (2, 4))
    arguments = ["--steps", table, "--json", found, "--predicted", told]
    monkeypatch.setattr(sys, "argv", [published.__file__, *arguments])
    published.main()
    assert "all: 2, " in capsys.readouterr().out
    with open(found, encoding="utf-8") as file:
        assert [row["steps"] for row in json.load(file)["rows"]] == ["all", "one machine"]
    with open(told, newline="", encoding="utf-8") as file:
        assert all(float(row["predicted_ms"]) > 0 for row in csv.DictReader(file))


@pytest.mark.parametrize(
    "text, said", [("gpus,hidden\n8,1024\n", "no column data"), ("", "no column"), (None, "line 2")]
)
def test_a_table_that_cannot_be_read_is_named(tmp_path, text, said):
    path = tmp_path / "steps.csv"
    if text is None:
        names = ",".join(field.name for field in dataclasses.fields(MeasuredStep))
        text = f"{names}\n" + "8," * 9 + "x,1.0\n"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        MeasuredStep.read(path)
