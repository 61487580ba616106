"""Chrome trace JSON: lanes, names, arrows, and files that are whole or not there."""

from __future__ import annotations

import functools
import os

import pytest

from tests.observability.timeline.files import TimelineFile
from tests.observability.timeline.perfetto import find_trace_processor, query
from tfpar.observability.timeline.trace import FlowArrow, Slice, Trace
from tfpar.spec import TfparError


def saved(trace: Trace, folder) -> TimelineFile:
    trace.save(str(folder / "t.json"))
    assert os.listdir(folder) == ["t.json"]
    return TimelineFile(folder / "t.json")


def test_processes_and_threads_have_names_and_slices_their_times(tmp_path):
    trace = Trace({0: "rank 0", 3: "rank 3"}, {"what": "a test"})
    trace.add(Slice(3, "communication", "up all_reduce", 0.002, 0.0035, "forward", {"bytes": 8}))
    trace.add(Slice(3, "compute", "up", 0.001, 0.002))
    file = saved(trace, tmp_path)
    assert file.processes == {0: "rank 0", 3: "rank 3"}
    assert file.content["otherData"] == {"what": "a test"}
    up, reduced = file.slices
    assert (up["name"], up["thread"], up["ts"], up["dur"]) == ("up", "compute", 1000, 1000)
    assert (reduced["ts"], reduced["dur"], reduced["args"]) == (2000, 1500, {"bytes": 8})
    assert up["tid"] < reduced["tid"]  # compute is above communication


def test_what_overlaps_has_lanes_of_its_own(tmp_path):
    trace = Trace({0: "rank 0"})
    for start, end in ((0, 3), (1, 2), (1, 4), (2, 5), (3, 4)):
        trace.add(Slice(0, "compute", f"{start} to {end}", start, end))
    file = saved(trace, tmp_path)  # which checks that none overlap
    assert len({e["tid"] for e in file.slices}) == 3


def test_rounding_makes_no_overlap(tmp_path):
    """Ends are starts of what follows, at times that no float of microseconds has.

    Of 2,000 such times some are cut off to the nanosecond before, where they are written as they
    come.
    """
    trace, times = Trace({0: "rank 0"}), [i * 1e-3 / 7 for i in range(2000)]
    for start, end in zip(times, times[1:], strict=False):
        trace.add(Slice(0, "compute", "up", start, end))
    file = saved(trace, tmp_path)
    assert len({e["tid"] for e in file.slices}) == 1
    nanoseconds = [round(seconds * 1e9) for seconds in times[:-1]]
    assert any(int(ns / 1000 * 1000.0) != ns for ns in nanoseconds)
    assert [round(e["ts"] * 1000) for e in file.slices] == nanoseconds


@pytest.mark.skipif(
    find_trace_processor() is None,
    reason="no trace processor of Perfetto: TFPAR_TRACE_PROCESSOR names one",
)
def test_perfetto_finds_each_row(tmp_path):
    trace, times = Trace({0: "rank 0", 1: "rank 1"}), [i * 1e-3 / 7 for i in range(500)]
    for start, end in zip(times, times[1:], strict=False):
        sent, received = (trace.add(Slice(i, "compute", "up", start, end)) for i in (0, 1))
        trace.flows.append(FlowArrow(sent, received))
    saved(trace, tmp_path)
    ask = functools.partial(query, find_trace_processor() or "", tmp_path / "t.json")
    assert ask("select count(*) from slice") == [["998"]]
    assert ask("select count(*) from flow") == [["499"]]
    names = "select name from process where pid > 0 order by pid"
    assert ask(names) == [["rank 0"], ["rank 1"]]
    assert ask("select name from stats where severity != 'info' and value > 0") == []


def test_arrows_begin_and_end_in_their_slices(tmp_path):
    trace = Trace({0: "rank 0", 1: "rank 1"})
    sent = trace.add(Slice(0, "communication", "send", 1, 2))
    received = trace.add(Slice(1, "communication", "recv", 1, 3))
    trace.flows.append(FlowArrow(sent, received))
    file = saved(trace, tmp_path)
    ends = [e for e in file.content["traceEvents"] if e["ph"] in "sf"]
    assert [(e["ph"], e["pid"]) for e in ends] == [("s", 0), ("f", 1)]


@pytest.mark.parametrize("end", [1e300, float("inf"), float("nan")])
def test_times_that_are_none_are_refused(end, tmp_path):
    trace = Trace({0: "rank 0"})
    trace.add(Slice(0, "compute", "endless", 0.0, end))
    with pytest.raises(TfparError, match="slice of the timeline is at"):
        trace.save(str(tmp_path / "t.json"))


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(TfparError, match="Cannot write the timeline .*nowhere"):
        Trace({}).save(str(tmp_path / "nowhere" / "t.json"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(TfparError, match="Cannot write"):
        Trace({}).save(str(tmp_path / "folder"))
    assert os.listdir(tmp_path) == ["folder"]
