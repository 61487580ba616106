"""A step with and without chunks: what computes, and what is moved meanwhile (ATP §4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.results import Result
from scripts.benchmark_columns.cells import Row, source
from scripts.pictures.svg import COLOURS, Drawing

RESULT = "atp_throughput"
INTERCONNECT, MODEL = "atp-ic2", "M4"
LANE, LEFT, WIDTH, TOP = 22, 130, 700, 56


class Piece(NamedTuple):
    """What one chunk does, in seconds from the beginning of the step."""

    chunk: int
    collective: bool
    start: float
    end: float


def pieces(compute_s: float, waiting_s: float, chunks: int) -> Iterator[Piece]:
    """A chunk computes behind the one before; what it moves comes behind both.

    That is `cost.sub_batch_cost.hidden_by_chunks`, on machines all of whose compute goes on
    meanwhile.
    """
    moved = 0.0
    for i in range(chunks):
        done = (i + 1) * compute_s / chunks
        yield Piece(i, False, i * compute_s / chunks, done)
        start = max(done, moved)
        moved = start + waiting_s / chunks
        yield Piece(i, True, start, moved)


def rows(result: Result) -> list[Row]:
    """ATP's, with the mesh that is best there, by their number of chunks."""
    return [
        row
        for row in result.rows
        if (row["interconnect"], row["model"], row["contender"]) == (INTERCONNECT, MODEL, "ATP")
    ]


def draw() -> Drawing:
    result = Result.load(RESULT)
    found = rows(result)
    scale = WIDTH / max(row["step_s"] for row in found)
    each = 2 * LANE + 30
    mesh = ", ".join(map(str, found[0]["mesh"]))
    name = f"GPT {MODEL} of ATP on {INTERCONNECT.rpartition('-')[2].upper()}, mesh ({mesh})"
    drawing = Drawing(
        LEFT + WIDTH + 20,
        TOP + each * len(found),
        f"{name}: a step in {', '.join(str(row['chunks']) for row in found)} chunks",
        source(result),
    )
    drawing.text(20, 24, f"{name}: a predicted step", 15)
    for i, row in enumerate(found):
        y = TOP + i * each
        chunks = row["chunks"]
        words = f"{chunks} chunk{'s' * (chunks > 1)}: {1e3 * row['step_s']:.0f} ms"
        drawing.text(LEFT, y - 5, words, 12)
        drawing.text(LEFT - 8, y + 14, "compute", 11, "end")
        drawing.text(LEFT - 8, y + LANE + 14, "collectives", 11, "end")
        for piece in pieces(row["compute_s"], row["waiting_s"], chunks):
            x, width = LEFT + piece.start * scale, (piece.end - piece.start) * scale
            lane = y + LANE * piece.collective
            drawing.box(x, lane, width, LANE - 2, COLOURS[piece.chunk])
            drawing.text(x + width / 2, lane + 14, str(piece.chunk), 10, "middle", "white")
    return drawing
