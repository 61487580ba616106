"""The table of a plan's stages."""

from __future__ import annotations

import dataclasses

from tfpar.observability.report.data.schema import PipelineSummary, Stage
from tfpar.observability.report.pipeline import idle_ranks, ranks_text, stages_tables

GIB = 2.0**30
FIRST = Stage(
    tuple(range(4)),
    "block_0 ... block_3 (4)",
    4096,
    1024,
    forward_s=0.010,
    backward_s=0.020,
    update_s=0.001,
    bubble=0.5,
    sent_bytes=3e6,
    in_flight=4,
    peak_bytes=3 * GIB,
    peak_task="0F3",
)
SECOND = dataclasses.replace(
    FIRST,
    ranks=(4, 6),
    forward_s=0.012,
    backward_s=0.024,
    update_s=0.0,
    bubble=0.0,
    sent_bytes=0.0,
    in_flight=1,
    peak_bytes=GIB,
    peak_task="",
)


def pipeline(*stages: Stage, bubble: float | None = 0.25) -> PipelineSummary:
    groups = tuple(stage.ranks for stage in stages)
    return PipelineSummary(
        "schedule 1f1b", groups, tuple(range(len(stages))), False, stages, bubble
    )


def test_a_line_for_each_stage():
    (text,) = stages_tables(pipeline(FIRST, SECOND), full=False)
    title, *table = text.split("\n")
    assert "of all 25 %" in title and title.startswith("Stages (schedule 1f1b)")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if "|" in line]
    assert rows == [
        ["Stage", "Ranks", "F", "B", "U", "Bubble", "Sent", "In flight", "Memory", "At"],
        "0,0-3,10.00 ms,20.00 ms,1.00 ms,50 %,2.87 MiB,4,3.00 GiB,0F3".split(","),
        ["1", "4, 6", "12.00 ms", "24.00 ms", "0.00 us", "0 %", "0 B", "1", "1.00 GiB", ""],
    ]


def test_of_many_stages_the_first_are_shown_unless_all_are_asked_for():
    many = pipeline(*[FIRST] * 16)
    _, more = stages_tables(many, full=False)
    assert more == "  and 8 more stages (full=True shows them)"
    where, takes = stages_tables(many, full=True)
    assert "block_0 ... block_3 (4)" in where and "| 15 " in where and "| 15 " in takes


def test_stages_that_were_not_priced_are_shown_with_what_lies_there():
    (text,) = stages_tables(pipeline(FIRST, SECOND, bubble=None), full=False)
    assert "4.00 KiB |   1.00 KiB |" in text


def test_ranks_with_next_to_no_work_are_named():
    def told(*stages: Stage) -> list[str]:
        return idle_ranks(stages)

    assert told(FIRST, SECOND) == []
    waiting = dataclasses.replace(SECOND, bubble=19.5)  # works for 1 / 20.5 of a step
    (text,) = told(FIRST, waiting, dataclasses.replace(waiting, ranks=(5, 7)))
    assert text == (
        "Ranks 4-7 work for less than 5 % of a step: it would take about as long without their "
        "devices."
    )
    nothing = dataclasses.replace(FIRST, ranks=(9,), forward_s=0, backward_s=0, update_s=0)
    assert told(SECOND, nothing)[0].startswith("Rank 9 works for less than 5 % of a step")


def test_ranks():
    assert [ranks_text(ranks) for ranks in ((3,), (0, 1), (0, 2), (2, 1), (5, 6, 7))] == [
        "3",
        "0-1",
        "0, 2",
        "2, 1",
        "5-7",
    ]
