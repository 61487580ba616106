"""Every benchmark writes its rows where `--json` says."""

from __future__ import annotations

import ast

import pytest

from benchmarks.results import ROOT

WORKERS = {"by_hand/worker.py"}
"""What takes arguments, but is started by a benchmark."""


def trees():
    folder = ROOT / "benchmarks"
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if name not in WORKERS and "ArgumentParser" in names_called(tree):
            yield pytest.param(tree, id=name)


def names_called(tree):
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {getattr(f, "attr", getattr(f, "id", "")) for f in called}


@pytest.mark.parametrize("tree", trees())
def test_a_benchmark_takes_json_and_saves(tree):
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert "--json" in texts and "save" in names_called(tree)
