"""The picture of a step: each rank's lanes, in the colours of what takes most of the time."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

import tfpar as tap
from tfpar.observability.timeline.picture import MOST_RANKS, draw_step
from tfpar.observability.timeline.trace import WAITING, Slice, Trace


@pytest.fixture
def drawn(tmp_path):
    def draw(trace: Trace) -> ET.Element:
        path = str(tmp_path / "t.json")
        trace.save(path)
        picture = draw_step(path)
        assert picture is not None
        return ET.fromstring(picture)

    return draw


def boxes(picture: ET.Element, colour: str) -> list[tuple[float, int]]:
    """Left end and width of each box of a colour, in pixels after the names."""
    paths = [p for p in picture.iter("{http://www.w3.org/2000/svg}path") if p.get("fill") == colour]
    found = [box for path in paths for box in re.findall(r"M(\d+) \S+?h(\d+)v", path.get("d", ""))]
    return [(int(x) - 150, int(width)) for x, width in found]


BLUE, PURPLE, GREY = "#4c8dd9", "#8e5bbf", "#c8c8c8"


def test_the_last_step_is_drawn_to_scale(drawn):
    trace = Trace({0: "rank <0>", 1: "rank 1"})
    for number, start in ((10, 0.0), (11, 8.0)):  # of 8 s: a pixel is 10 ms
        for rank in (0, 1):
            trace.add(Slice(rank, "steps", f"step {number}", start, start + 8))
        trace.add(Slice(0, "compute", "up", start, start + 2 * (number - 9), "forward"))
        trace.add(Slice(0, "communication", "sum", start + 6, start + 7, "backward"))
    trace.add(Slice(1, "communication", "waiting for rank 0", 9, 14, WAITING))
    picture = drawn(trace)
    assert boxes(picture, BLUE) == [(0, 400)]
    assert boxes(picture, PURPLE) == [(600, 100)]
    assert boxes(picture, GREY) == [(100, 500)]
    texts = [t.text for t in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "step 11: 8.00 s" in texts and "rank <0>, compute" in texts and "4.00 s" in texts
    assert "rank 1, communication" in texts and "forward" in texts and "update" not in texts


def test_thousands_of_slices_are_a_small_picture(drawn):
    trace = Trace({rank: f"rank {rank}" for rank in range(MOST_RANKS + 3)})
    for rank in trace.processes:
        trace.add(Slice(rank, "steps", "step 1", 0.0, 1.0))
        for i in range(1000):
            kind = ("forward", "backward", "update")[i % 3]
            trace.add(Slice(rank, "compute", f"op {i}", i / 1000, (i + 0.5) / 1000, kind))
    picture = drawn(trace)
    assert len(ET.tostring(picture)) < 300_000
    assert "3 more ranks" in [t.text for t in picture.iter("{http://www.w3.org/2000/svg}text")]


def test_a_callback_without_a_file_is_no_picture(tmp_path):
    timeline = tap.Timeline(tmp_path / "t.json", steps=(2, 3))
    assert timeline._repr_svg_() is None
    (tmp_path / "t.json").write_text("[]")
    assert timeline._repr_svg_() is None
