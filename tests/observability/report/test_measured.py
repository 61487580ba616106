"""A measured step beside the predicted one: which it is, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.observability.report import reports
from tfpar.observability.report import measured
from tfpar.observability.report.measured import read_measured, with_measured
from tfpar.observability.timeline.predicted import predicted_trace
from tfpar.observability.timeline.trace import WAITING, Slice, Trace
from tfpar.spec import PlanError


def recorded(folder: Path, *lengths: float, name: str = "mlp/hidden") -> str:
    """A timeline of two ranks, of which the second begins each step a millisecond later."""
    trace, begin = Trace({0: "rank 0", 1: "rank 1"}), 0.5
    for number, length in enumerate(lengths, 10):
        for rank, late in ((0, 0.0), (1, 1e-3)):
            told, start, end = {"step": number}, begin + late, begin + length
            trace.add(Slice(rank, "steps", f"step {number}", start, end))
            trace.add(Slice(rank, "compute", name, start, start + 2e-3, "forward", told))
            trace.add(Slice(rank, "communication", "sum", end - 1e-3, end, "forward", told))
        told = {"step": number}
        trace.add(
            Slice(
                *(0, "communication", "waiting for rank 1"),
                *(begin + 2e-3, begin + 3e-3, WAITING, told),
            )
        )
        begin += length
    trace.save(str(folder / "t.json"))
    return str(folder / "t.json")


def test_the_step_of_median_length_is_shown_from_its_begin(tmp_path):
    step = read_measured(recorded(tmp_path, 0.02, 0.04, 0.03))
    assert (step.source, step.number, step.ranks) == ("t.json", 12, 2)
    assert step.seconds == pytest.approx(0.03)
    assert step.all_seconds == pytest.approx((0.02, 0.04, 0.03))
    assert [(lane.rank, lane.thread) for lane in step.lanes] == [
        *((0, "compute"), (0, "communication")),
        *((1, "compute"), (1, "communication")),
    ]
    computes, meets, late, _ = step.lanes
    assert [(s.name, s.category) for s in computes.slices] == [("mlp/hidden", "forward")]
    assert [s.category for s in meets.slices] == [WAITING, "forward"]
    assert computes.slices[0].start == pytest.approx(0) and meets.slices[1].end == pytest.approx(
        0.03
    )
    assert late.slices[0].start == pytest.approx(1e-3)


def test_of_too_many_slices_the_first_ranks_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "MOST_SLICES", 4)
    step = read_measured(recorded(tmp_path, 0.02))
    assert step.ranks == 2 and {lane.rank for lane in step.lanes} == {0}


def test_a_report_has_it_beside_the_predicted_one(tmp_path):
    path = recorded(tmp_path, 0.02)
    report = with_measured(reports.mlp(), path)
    assert report.measured == read_measured(path)
    assert report.cost == reports.mlp().cost


def test_files_that_have_none_are_refused(tmp_path):
    predicted = tmp_path / "predicted.json"
    predicted_trace(reports.mlp()).save(str(predicted))
    with pytest.raises(PlanError, match=r"holds no measured step\. Give a file that tap.Timeline"):
        read_measured(str(predicted))
    other = recorded(tmp_path, 0.02, name="net/dense_7")
    with pytest.raises(PlanError, match=r"of another model: none .*'net/dense_7'.*'classes'"):
        with_measured(reports.mlp(), other)
    damaged = tmp_path / "damaged.json"
    with pytest.raises(PlanError, match=r"Cannot read the timeline '.*damaged.json'"):
        read_measured(str(damaged))
    damaged.write_text(json.dumps({"traceEvents": [{"ph": "X", "ts": "now"}]}))
    with pytest.raises(PlanError, match=re.escape("traceEvents[0].ts is 'now'; it must be a num")):
        read_measured(str(damaged))
