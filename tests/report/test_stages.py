"""The table of a plan's stages."""

from __future__ import annotations

from tfpar.cost.staged import StagedCost, StageShare
from tfpar.report.stages import ranks_text, stages_table

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


def test_ranks():
    assert [ranks_text(ranks) for ranks in ((3,), (0, 1), (0, 2), (2, 1), (5, 6, 7))] == [
        "3",
        "0-1",
        "0, 2",
        "2, 1",
        "5-7",
    ]
