"""`tfpar report`: the page of a saved plan, and what it says when there is none."""

from __future__ import annotations

import dataclasses
import json
import webbrowser
from pathlib import Path

import pytest

from tests.observability.report.pages import data_of
from tests.planning.problems import Captured, partition
from tfpar.cli.main import main
from tfpar.planning.intra_op import TapPlanner
from tfpar.plans import Plan


def as_json(data: object) -> object:
    return json.loads(json.dumps(data))


@pytest.fixture(scope="module")
def plan() -> Plan:
    problem = Captured.saved("mlp").problem([2, 2], "cpu")
    found = TapPlanner().solve(problem)
    return found.with_partitioned(partition(problem, found))


@pytest.fixture
def saved(plan, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    plan.save("plan.json")
    return tmp_path


def test_a_page_is_written_from_the_file_alone(plan, saved, capsys):
    assert main(["report", "plan.json", "-o", "page.html"]) == 0
    assert capsys.readouterr().out.startswith("Wrote page.html (")
    page = Path("page.html").read_text(encoding="utf-8")
    assert page == Plan.load("plan.json").to_html()
    assert data_of(page) == data_of(plan.to_html()) == as_json(plan.report_data())


def test_the_page_lies_beside_the_plan_and_is_opened(saved, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert main(["report", "plan.json", "--open"]) == 0
    assert opened == [(saved / "plan.html").as_uri()] and (saved / "plan.html").exists()


def test_to_html_writes_and_says_where_it_cannot(plan, saved):
    assert plan.to_html("page.html") == Path("page.html").read_text(encoding="utf-8")
    with pytest.raises(Exception, match="Cannot write the report file 'no/page.html'"):
        plan.to_html("no/page.html")


def refused(capsys, *arguments: str) -> str:
    assert main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("tfpar report: ") and err.count("\n") == 1
    return err


def test_a_plan_without_a_report_says_how_to_make_one(plan, saved, capsys):
    dataclasses.replace(plan, partitioned=None).save("bare.json")
    err = refused(capsys, "bare.json")
    assert "'bare.json' holds no report" in err and "tfpar plan SCRIPT.PY:FUNCTION -o bare" in err


def test_other_files_and_versions_are_refused(saved, capsys):
    assert "There is no plan file 'none.json'" in refused(capsys, "none.json")
    data = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    data["report"]["version"] = 99
    Path("newer.json").write_text(json.dumps(data), encoding="utf-8")
    assert "has the version 99; this tfpar reads 1" in refused(capsys, "newer.json")
    data["version"] = 99
    Path("newer.json").write_text(json.dumps(data), encoding="utf-8")
    assert "was written by a newer tfpar" in refused(capsys, "newer.json")
    assert "Cannot write the report file" in refused(capsys, "plan.json", "-o", "no/page.html")
