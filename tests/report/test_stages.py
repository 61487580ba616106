"""The table of a plan's stages."""

from __future__ import annotations

import dataclasses

from tfpar.cost.staged import StagedCost, StageShare
from tfpar.report.stages import idle_ranks, ranks_text, stages_table

GIB = 2.0**30
FIRST = StageShare(
    tuple(range(4)), 0.010, 0.020, 0.001, 0.002, 0.5, 3e6, 4, 2 * GIB, GIB / 4, 3 * GIB, "0F3"
)
SECOND = StageShare((4, 6), 0.012, 0.024, 0.0, 0.0, 0.0, 0.0, 1, GIB, 0.0, GIB, "")


def test_a_line_for_each_stage():
    title, *table = stages_table(StagedCost(0.3, 0.25, (FIRST, SECOND))).split("\n")
    assert "of all 25 %" in title
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if "|" in line]
    assert rows == [
        ["Stage", "Ranks", "F", "B", "U", "Bubble", "Sent", "In flight", "Memory", "At"],
        "0,0-3,10.00 ms,20.00 ms,1.00 ms,50 %,2.87 MiB,4,3.00 GiB,0F3".split(","),
        ["1", "4, 6", "12.00 ms", "24.00 ms", "0.00 us", "0 %", "0 B", "1", "1.00 GiB", ""],
    ]


def test_ranks_with_next_to_no_work_are_named():
    def told(*shares: StageShare) -> list[str]:
        return idle_ranks(StagedCost(0.3, 0.25, shares))

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
