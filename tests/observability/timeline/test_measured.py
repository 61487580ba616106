"""What ranks recorded, as one timeline: clocks, waiting, and who was late."""

from __future__ import annotations

import pytest

from tests.observability.timeline.files import TimelineFile
from tfpar.observability.timeline.measured import clocks_ahead, measured_trace
from tfpar.observability.timeline.records import (
    CollectiveKind,
    CollectiveSpan,
    OpSpan,
    RankTrace,
    StepOfRank,
    decode_traces,
    encode_traces,
)

MS = 1_000_000  # nanoseconds
SUM = CollectiveKind(
    "sum", (0, 1, 2), ("net/up", "net/down"), "all_reduce", ("data",), 4096, "backward", 0.5
)


def record(rank: int, arrived: int, *, clock: str = "a", ahead: int = 0, kind=SUM) -> RankTrace:
    """A step of 0 to 20 ms in which ranks meet, from when they arrive until 10 ms."""
    ran = OpSpan(ahead, ahead + arrived * MS, "net/up", "MatMul", "forward")
    met = CollectiveSpan(kind, 0, ahead + arrived * MS, ahead + 10 * MS)
    return RankTrace(rank, clock, [StepOfRank(7, ahead, ahead + 20 * MS, [ran], [], [met])])


def drawn(records: list[RankTrace], folder) -> TimelineFile:
    measured_trace(records).save(str(folder / "t.json"))
    return TimelineFile(folder / "t.json")


def test_waiting_names_the_late_rank(tmp_path):
    file = drawn([record(0, 3), record(1, 8), record(2, 5)], tmp_path)
    assert file.processes == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    waits = {e["pid"]: (e["name"], e["ts"], e["dur"]) for e in file.waits()}
    assert waits == {
        0: ("waiting for rank 1", 3000, 5000),
        2: ("waiting for rank 1", 5000, 3000),
    }
    for rank in range(3):
        (met,) = file.collectives(rank)
        assert (met["name"], met["cat"]) == ("net/up + 1 all_reduce", "backward")
        assert (met["ts"], met["dur"]) == (8000, 2000)
        assert met["args"] == {
            "step": 7,
            "bytes": 4096,
            "group": [0, 1, 2],
            "axes": ["data"],
            "layers": ["net/up", "net/down"],
            "predicted": 0.5,
        }
        (ran,) = file.of("compute", rank)
        assert (ran["name"], ran["args"]) == ("net/up", {"op": "MatMul", "step": 7})
        (step,) = file.of("steps", rank)
        assert (step["name"], step["ts"], step["dur"]) == ("step 7", 0, 20000)


def test_clocks_of_other_machines_are_aligned_where_ranks_meet(tmp_path):
    """The second machine is an hour ahead: without that, its rank would seem an hour late."""
    hour = 3600 * 1000 * MS
    records = [record(0, 3), record(1, 8, clock="b", ahead=hour), record(2, 5)]
    assert clocks_ahead(records) == {"a": 0, "b": hour}
    file = drawn(records, tmp_path)
    assert {e["pid"]: e["dur"] for e in file.waits()} == {0: 5000, 2: 3000}
    assert max(e["ts"] for e in file.slices) < 20_000


def test_the_median_is_what_counts():
    """A rank that learns late of the end of one collective has no other clock."""
    late = []
    for rank, clock, ends in ((0, "a", (1, 2, 3)), (1, "b", (101, 102, 150))):
        met = [CollectiveSpan(SUM, nth, 0, end * MS) for nth, end in enumerate(ends)]
        late.append(RankTrace(rank, clock, [StepOfRank(1, 0, 200 * MS, [], [], met)]))
    assert clocks_ahead(late) == {"a": 0, "b": 100 * MS}


def test_clocks_are_aligned_by_way_of_others():
    """Ranks 0 and 2 meet in nothing; rank 1 has met both."""
    near, far = (
        CollectiveKind(key, group, ("x",), "send", (), 4, "forward", None)
        for key, group in (("near", (0, 1)), ("far", (1, 2)))
    )
    met = [CollectiveSpan(near, 0, 5, 5 + 5 * MS), CollectiveSpan(far, 0, 5, 5 + 9 * MS)]
    records = [
        record(0, 3, kind=near),
        RankTrace(1, "b", [StepOfRank(7, 0, 20 * MS, [], [], met)]),
        record(2, 3, clock="c", kind=far),
    ]
    ahead = clocks_ahead(records)
    assert ahead["b"] == 5 + 5 * MS - 10 * MS
    assert ahead["c"] - ahead["b"] == 10 * MS - (5 + 9 * MS)


def test_ranks_that_have_met_in_nothing_are_aligned_where_steps_begin():
    alone = RankTrace(1, "b", [StepOfRank(7, 500 * MS, 520 * MS, [], [], [])])
    assert clocks_ahead([record(0, 3), alone]) == {"a": 0, "b": 500 * MS}


def test_what_is_sent_leads_to_who_receives_it_and_is_waited_for_there_alone(tmp_path):
    sent = CollectiveKind("x", (0, 1), ("net/up",), "send", (), 64, "forward", None)
    received = CollectiveKind("x", (0, 1), ("step",), "recv", (), 64, "forward", None)
    file = drawn([record(0, 6, kind=sent), record(1, 2, kind=received)], tmp_path)
    assert [(e["pid"], e["name"], e["ts"]) for e in file.waits()] == [
        (1, "waiting for rank 0", 2000)
    ]
    assert {e["pid"]: e["name"] for e in file.collectives()} == {
        0: "net/up send",
        1: "net/up recv",
    }
    arrows = [e["pid"] for e in file.content["traceEvents"] if e["ph"] in "sf"]
    assert arrows == [0, 1]


def test_an_arrival_past_the_end_is_cut_there(tmp_path):
    """Clocks are never quite equal: what is waited for does not end before it has begun."""
    late = record(1, 8)
    early = RankTrace(
        0, "a", [StepOfRank(7, 0, 20 * MS, [], [], [CollectiveSpan(SUM, 0, MS, 7 * MS)])]
    )
    file = drawn([early, late], tmp_path)
    (wait,) = file.waits()
    (met,) = file.collectives(0)
    assert (wait["ts"], wait["dur"], met["dur"]) == (1000, 6000, 0)


@pytest.mark.parametrize("records", [[], [record(0, 3), record(1, 8)]])
def test_records_travel_as_text(records):
    assert decode_traces(encode_traces(records)) == records
