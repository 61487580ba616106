"""Pictures show what the package computes and results hold, and files are in step with them."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.results import ROOT, Result
from scripts.benchmark_plots import IMAGES, PLOTS
from scripts.pictures import chunks, megatron, schedules
from scripts.pictures.__main__ import PICTURES
from tfpar.cost import hidden_by_chunks
from tfpar.spec import Partial, format_spec

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_pictures_are_current(name):
    drawn = str(PICTURES[name]())
    written = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == written, "python -m scripts.pictures"
    image = ElementTree.fromstring(drawn)
    assert image.findtext(f"{SVG}title")
    width, height = float(image.get("width")), float(image.get("height"))
    for box in image.iter(f"{SVG}rect"):
        if "x" in box.attrib:
            x, y, w, h = (float(box.get(key)) for key in ("x", "y", "width", "height"))
            assert 0 <= x and x + w <= width and 0 <= y and y + h <= height


def test_every_picture_is_shown():
    pages = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs").rglob("*.md"))
    for name in (*PICTURES, *PLOTS):
        assert f"images/{name}.svg" in pages, name


def test_chunks_are_drawn_as_long_as_they_are_priced():
    for row in chunks.rows(Result.load(chunks.RESULT)):
        drawn = list(chunks.pieces(row["compute_s"], row["waiting_s"], row["chunks"]))
        assert max(piece.end for piece in drawn) == pytest.approx(row["step_s"], rel=1e-3)
    for compute, waiting, count in ((10.0, 4.0, 2), (10.0, 4.0, 4), (4.0, 10.0, 4)):
        end = max(piece.end for piece in chunks.pieces(compute, waiting, count))
        saved = hidden_by_chunks(compute, waiting, count, 1.0)
        assert end == pytest.approx(compute + waiting - saved)


def test_megatrons_split_has_one_sum():
    found = megatron.split()
    (reshard,) = found.reshards
    assert reshard.tensor.op.name == "y" and isinstance(reshard.source[1], Partial)
    assert format_spec(found.specs[reshard.tensor]) == "S(0),R"
    (x, *_, y) = megatron._drawn(found)
    blocks = [list(megatron._blocks(shape, spec)) for _, shape, spec in (x, y)]
    assert [[ranks for _, ranks in parts] for parts in blocks] == [[[0, 1], [2, 3]]] * 2


def test_schedules_are_drawn_as_they_are_simulated():
    gpipe, one, interleaved, halved = (schedules.simulated(n) for n in schedules.NAMES)
    assert gpipe.seconds == one.seconds == 33  # (8 + 4 - 1) microbatches of F and B
    assert interleaved.seconds < one.seconds and halved.seconds < one.seconds
    most = [max(peak.num_bytes for peak in t.peaks) for t in (gpipe, one, halved)]
    assert most == [8, 4, 4]
