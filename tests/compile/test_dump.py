"""`TFPAR_DUMP`: what the compiler makes of a step, pass by pass, in a folder."""

from __future__ import annotations

from tests.compile.steps import mlp_step
from tests.ir.text.same import assert_same_step
from tfpar.compile import simplify_step
from tfpar.compile.passes import DUMP, dump_of, ignore_pass
from tfpar.ir import parse_step


def test_without_the_variable_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dump_of("step", environment={}) is ignore_pass
    assert dump_of("step", environment={DUMP: ""}) is ignore_pass
    simplify_step(mlp_step(), dump_of("step", environment={}))
    assert not list(tmp_path.iterdir())


def test_graphs_lie_in_their_order_in_a_folder_for_each_compilation(tmp_path):
    environment = {DUMP: str(tmp_path / "made" / "here")}
    for _ in range(2):
        step = mlp_step()
        simplify_step(step, dump_of("train step/1", environment=environment))
    first, second = sorted((tmp_path / "made" / "here").iterdir())
    assert (first.name, second.name) == ("train_step_1-0", "train_step_1-1")
    names = sorted(path.name for path in first.iterdir())
    assert names[:4] == [
        "00-captured.txt",
        "01-order-effects.txt",
        "02-inline-calls.txt",
        "03-split-bundles.txt",
    ]
    assert_same_step(parse_step((second / "00-captured.txt").read_text()), mlp_step())
    assert_same_step(parse_step((second / names[-1]).read_text()), step)


def test_several_processes_write_apart(tmp_path):
    environment = {DUMP: str(tmp_path)}
    for rank in range(2):
        dump_of("step", rank, environment)("captured", lambda: "")
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.txt"))
    assert found == ["rank-0/step-0/00-captured.txt", "rank-1/step-0/00-captured.txt"]
