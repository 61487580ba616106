"""The figures of the documentation are those of the results that lie beside the benchmarks."""

import datetime
import json
import pathlib
import re

import pytest

from benchmarks import results
from benchmarks.results import FOLDER, Result
from scripts import benchmark_tables
from scripts.benchmark_columns.cells import source
from scripts.benchmark_columns.planning import before_and_after
from scripts.benchmark_columns.throughput import chunks, contenders
from scripts.benchmark_tables import BLOCKS, MARKED, in_step, planning_in_words

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = "python -m scripts.benchmark_tables"


@pytest.mark.parametrize("name", sorted({block.page for block in BLOCKS.values()}))
def test_pages_say_what_was_measured(name):
    written = (ROOT / name).read_text(encoding="utf-8")
    assert in_step(written) == written, f"Results have changed. Run {COMMAND}"


def test_every_part_is_where_it_belongs():
    found = {
        match[1]: path.relative_to(ROOT).as_posix()
        for path in PAGES
        for match in MARKED.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == {name: block.page for name, block in BLOCKS.items()}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path):
    assert path.stem in {block.source for block in BLOCKS.values()}, "nothing quotes it"
    result = Result.load(path.stem)
    assert result.rows and datetime.date.fromisoformat(result.date)
    module = re.fullmatch(r"python -m ((?:benchmarks|scripts)\.\w+)( .*)?", result.command)[1]
    assert (ROOT / (module.replace(".", "/"))).with_suffix(".py").exists() or (
        ROOT / module.replace(".", "/") / "__main__.py"
    ).exists()
    assert result.commit or "as rounded in the table of" in result.note


def test_a_figure_that_is_not_the_newest_is_seen(monkeypatch):
    result = Result.load("search")
    page = (ROOT / "docs/tap.md").read_text(encoding="utf-8")
    rows = [{**row, "total_s": row["total_s"] + 5} for row in result.rows]
    slower = Result(**{**vars(result), "rows": rows})
    load = Result.load
    found = {"search": slower}
    monkeypatch.setattr(benchmark_tables.Result, "load", lambda name: found.get(name) or load(name))
    assert in_step(page) != page
    assert f"in {rows[3]['total_s']:.0f} CPU-seconds" in planning_in_words(slower)


def test_what_was_wanted_of_planning_is_reached_where_it_takes_no_more():
    result = Result.load("search")
    times = {"t5-48": 2.0, "gpt-12": 3.0}
    rows = [{**row, "search_s": times.get(row["case"], 0.1)} for row in result.rows]
    lines = before_and_after(Result(**{**vars(result), "rows": rows})).splitlines()
    assert "| T5-Large, search | 14 | 2.0 | 0.14 | 2 | yes |" in lines
    assert "| GPT, 12 layers, search | 7.3 | 3.0 | 0.41 | 1.5 | no, 2.0 times as much |" in lines


def test_chunks_gain_beside_what_the_paper_s_gain():
    """By hand: 10, 12 and 11 TFLOP/s here, 20, 21 and 22 there."""
    setting = {"interconnect": "atp-ic2", "devices": 8, "model": "M2", "mesh": [4, 2]}
    found = zip((1, 2, 4), (10.0, 12.0, 11.0), (20.0, 21.0, 22.0), strict=True)
    rows = [
        {**setting, "contender": "ATP", "chunks": n, "tflops": here, "paper_tflops": there}
        for n, here, there in found
    ]
    rows[1]["chosen"] = True
    others = (("Megatron-LM", 8.0), ("2-D", 4.0))
    rows += [{**setting, "contender": name, "chunks": 1, "tflops": f} for name, f in others]
    result = Result("c", "2026-01-01", "abc", 2, {}, rows)
    paper = "20.0 / 21.0 / 22.0"
    line = f"| IC2 | M2 | (4, 2) | 10.0 / 12.0 / 11.0 | {paper} | 0.50 | +20% / +10% | +5% / +10% |"
    assert line in chunks(result).splitlines()
    fig_10 = contenders(result).splitlines()
    gains = "+25% | +50% | at most about 10 % |"
    assert f"| IC2, 8 GPUs | M2 | 8.0 | 4.0 | 12.0 | (4, 2), 2 | {gains}" in fig_10


def test_a_run_is_written_with_its_command_and_a_line_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    main = str(ROOT / "benchmarks" / "shaped_cluster" / "__main__.py")
    path = tmp_path / "run.json"
    monkeypatch.setattr("sys.argv", [main, "--quick", "--json", str(path), "--model", "gpt"])
    monkeypatch.setattr(results, "measure_machine", lambda: 1.3)
    rows = [{"a": 1, "b": None}, {"a": 2.5, "b": "x"}]
    results.save(path, rows)
    text = path.read_text(encoding="utf-8")
    assert '\n  {"a": 1, "b": null},\n' in text and json.loads(text)["rows"] == rows
    result = Result.load("run")
    assert result.command == "python -m benchmarks.shaped_cluster --quick --model gpt"
    assert result.rows == rows and "python" in result.versions and result.machine == 1.3
    results.save(None, rows)  # no file asked for


def test_without_rows_there_is_still_a_file(tmp_path):
    path = tmp_path / "none.json"
    Result("c", "2026-01-01", "", 2, {}, []).save(path)
    assert json.loads(path.read_text())["rows"] == []


def test_a_table_says_how_slow_the_machine_was_where_that_is_known():
    known = Result("c", "2026-01-01", "abc", 2, {}, [], "a note", 1.3)
    assert source(known) == "`c`, 2026-01-01, commit abc, machine 1.30, a note."
    before = Result("c", "2026-01-01", "", 2, {}, [])
    assert source(before) == "`c`, 2026-01-01."
