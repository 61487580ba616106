"""Timelines of ranks that are processes: one file of all of them, in which who is late is named."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

from tests.observability.timeline.files import TimelineFile
from tests.tf.distributed import jobs
from tests.tf.distributed.timeline_ranks import BATCH, LATE_S

pytestmark = pytest.mark.xdist_group("processes")

RANKS = "tests.tf.distributed.timeline_ranks"


def run(
    backend: str, *options: object, arguments: tuple[object, ...] = (), anew: bool = False
) -> str:
    """What two ranks print that train under `tfpar run` with these options."""
    told = {"backend": backend, "options": options, "anew": anew}
    ended = jobs.run(2, RANKS, *arguments, seconds=240, **told)
    assert ended.code == 0, ended.output
    return ended.output


def check(path: Path, printed: str) -> None:
    """The file is of steps 3 and 4 of both ranks, and rank 1 is late in each of them."""
    file = TimelineFile(path)
    assert file.processes == {0: "rank 0", 1: "rank 1"}
    for rank in (0, 1):
        assert [e["name"] for e in file.of("steps", rank)] == ["step 3", "step 4"]
        assert {"net/up", "net/head"} <= {e["name"] for e in file.of("compute", rank)}
    late = [e for e in file.waits(0) if e["name"] == "waiting for rank 1"]
    longest = {step: 0.0 for step in (3, 4)}
    for wait in late:
        step = wait["args"]["step"]
        longest[step] = max(longest[step], wait["dur"] / 1e6)
    assert min(longest.values()) > LATE_S * 0.8
    planned = re.search(r"planned (\d+)", printed)
    assert planned
    for rank in (0, 1):
        for step in (3, 4):
            moved = sum(e["args"]["bytes"] for e in file.collectives(rank, step=step))
            assert moved == int(planned[1])
            assert all(e["args"]["group"] == [0, 1] for e in file.collectives(rank, step=step))


@pytest.mark.slow
def test_the_callback_on_two_processes(tmp_path):
    path = tmp_path / "t.json"
    check(path, run("tensorflow", arguments=(path,)))
    assert os.listdir(tmp_path) == ["t.json"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_a_program_under_tfpar_run_needs_no_changes(tmp_path):
    path = tmp_path / "t.json"
    asked = ("--timeline-filename", path, "--timeline-steps", "3-4")
    check(path, run("horovod", *asked, anew=True))


@pytest.mark.slow
def test_stages_send_to_each_other(tmp_path):
    path = tmp_path / "t.json"
    run("tensorflow", "--timeline-filename", path, "--timeline-steps", "3", arguments=("stages",))
    file = TimelineFile(path)
    for rank in (0, 1):
        tasks = [e["name"] for e in file.of("tasks", rank)]
        assert sorted(tasks) == [f"{rank}B0", f"{rank}B1", f"{rank}F0", f"{rank}F1"]
    sent = [e for e in file.collectives(0) if e["name"] == "net/up send"]
    received = [e for e in file.collectives(1) if e["name"] == "net/up recv"]
    assert len(sent) == len(received) == 2
    for one in (*sent, *received):
        assert (one["args"]["group"], one["args"]["bytes"]) == ([0, 1], BATCH // 2 * 16 * 4)
    begins = {e["name"]: e["ts"] for e in file.of("tasks", 1)}
    assert all(begins["1F0"] >= one["ts"] for one in received[:1])
    late = [e for e in file.waits(0) if e["name"] == "waiting for rank 1"]
    assert max(e["dur"] for e in late) / 1e6 > LATE_S * 0.8
    arrows = [e["ph"] for e in file.content["traceEvents"] if e["ph"] in "sf"]
    assert len(arrows) >= 2 * (len(sent) + 1)


@pytest.mark.slow
def test_a_program_that_ends_before_the_steps_says_so(tmp_path):
    printed = run("tensorflow", "--timeline-filename", tmp_path / "t.json")
    assert "is not written: training ended after 4 steps" in printed
    assert not os.listdir(tmp_path)
