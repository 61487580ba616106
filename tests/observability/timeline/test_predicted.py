"""Predicted timelines: as long as the plan's step, of all its layers and collectives."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.graphs import BATCH, saved
from tests.observability.timeline.files import Event, TimelineFile
from tests.time_limits import time_limit
from tfpar.__main__ import main
from tfpar.cluster import find_cluster
from tfpar.constraints import batch, shard
from tfpar.observability.report.data.schema import Report, TaskSummary, TransferSummary, read_report
from tfpar.observability.timeline.predicted import MOST_RANKS, predicted_trace
from tfpar.pipeline import Pipeline
from tfpar.planning import PlanRequest, StepSearch, attach_partitioned
from tfpar.planning.intra_op import find_planner
from tfpar.plans import Plan
from tfpar.spec import Mesh, PlanError

ROOT = Path(__file__).parents[3]
CASES = ("one piece", "stages", "two stages a rank", "halves of backward passes", "microbatches")
SPLIT = shard("block_0_fc1/kernel", 1, "model")


@functools.cache
def planned(case: str) -> Plan:
    pipeline = {
        "stages": Pipeline(2, 4),
        "two stages a rank": Pipeline(2, 4, "interleaved"),
        "halves of backward passes": Pipeline(2, 4, "zb-h1"),
        "microbatches": Pipeline(microbatches=2),
    }.get(case)
    mesh, constraints = Mesh(("data", "model"), (2, 2)), (batch("data"), SPLIT)
    if pipeline is not None and pipeline.order.num_stages > 1:
        mesh, constraints = Mesh(("data",), (2,)), (batch("data"),)
    cluster = find_cluster("v100-ethernet", Mesh.of([1, 4]))
    cluster = dataclasses.replace(cluster, step_s=1e-4)
    request = PlanRequest(mesh, cluster, constraints, pipeline=pipeline)
    search = StepSearch(saved("wide"), BATCH, find_planner("tap"), state_ratio=2.0)
    return attach_partitioned(*search(request), cluster)


@functools.cache
def report(case: str) -> Report:
    return read_report(planned(case).report_data(), case)


def drawn(found: Report, folder: Path) -> TimelineFile:
    predicted_trace(found).save(str(folder / "t.json"))
    return TimelineFile(folder / "t.json")


def end_of(events: list[Event]) -> float:
    """In seconds."""
    return max(e["ts"] + e["dur"] for e in events) / 1e6


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_is_as_long_as_the_plans_step(case, tmp_path):
    found = report(case)
    file = drawn(found, tmp_path)
    assert file.processes == {rank: f"rank {rank}" for rank in range(4)}
    assert end_of(file.slices) == pytest.approx(found.cost.seconds, rel=1e-4)
    for rank in range(4):
        (step,) = file.of("steps", rank)
        assert step["dur"] / 1e6 == pytest.approx(found.cost.seconds, rel=1e-4)
        compute = file.of("compute", rank)
        assert len({e["tid"] for e in compute}) == 1  # it does one thing at a time
        start = [e for e in compute if e["name"] == "start"]
        assert sum(e["dur"] for e in start) == pytest.approx(100, rel=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_layers_take_what_they_are_said_to(case, tmp_path):
    found = report(case)
    file = drawn(found, tmp_path)
    stage_of = {} if found.pipeline is None else dict(enumerate(found.pipeline.actor_of_stage))
    for rank in range(4):
        taken: collections.Counter[str] = collections.Counter()
        for event in file.of("compute", rank):
            taken[event["name"]] += event["dur"] / 1e6
        for layer in found.layers:
            actor = stage_of.get(layer.stage or 0)
            if actor is None or rank in found.pipeline.actors[actor]:
                assert taken[layer.path] == pytest.approx(layer.seconds.total, rel=1e-2, abs=1e-8)
            else:
                assert layer.path not in taken


@pytest.mark.parametrize("case", ["one piece", "microbatches"])
def test_collectives_are_the_plans(case, tmp_path):
    found = report(case)
    assert found.collectives
    for rank in range(4):
        seen = [
            (e["name"], tuple(e["args"]["axes"]), e["args"]["bytes"], e["cat"])
            for e in drawn(found, tmp_path).collectives(rank)
        ]
        told = [(f"{c.layer} {c.kind}", c.axes, c.num_bytes, c.phase) for c in found.collectives]
        assert sorted(seen) == sorted(told)
    for event in drawn(found, tmp_path).collectives():
        assert event["pid"] in event["args"]["group"]


def test_sums_of_gradients_run_beside_the_backward_pass(tmp_path):
    found = report("one piece")
    sums = [c for c in found.collectives if c.when == "beside"]
    assert sums
    file = drawn(found, tmp_path)
    layers = {c.layer for c in sums}
    shown = [e for e in file.collectives(0) if e["name"].rpartition(" ")[0] in layers]
    update = [e for e in file.of("compute", 0) if e["cat"] == "update"]
    begin = update[0]["ts"] / 1e6 if update else found.cost.seconds
    beside = [e for e in shown if e["cat"] != "update"]
    assert end_of(beside) == pytest.approx(begin, rel=1e-4)


def test_what_chunks_hide_overlaps_with_compute(tmp_path):
    found = report("one piece")
    waited = sum(
        c.seconds for c in found.collectives if c.when == "between" and c.phase != "update"
    )
    assert waited
    hidden = waited / 2
    cost = dataclasses.replace(found.cost, hidden_s=hidden, seconds=found.cost.seconds - hidden)
    file = drawn(dataclasses.replace(found, cost=cost), tmp_path)
    assert end_of(file.slices) == pytest.approx(cost.seconds, rel=1e-4)
    busy = [(e["ts"], e["ts"] + e["dur"]) for e in file.of("compute", 0)]
    exposed = {c.layer for c in found.collectives if c.when == "between"}
    moved = [e for e in file.collectives(0) if e["name"].rpartition(" ")[0] in exposed]
    assert any(a < e["ts"] + e["dur"] and e["ts"] < b - 1e-3 for e in moved for a, b in busy)


@pytest.mark.parametrize("case", CASES[1:4])
def test_tasks_run_when_the_simulation_says(case, tmp_path):
    found = report(case)
    pipeline = found.pipeline
    file = drawn(found, tmp_path)
    before = found.cost.seconds - max(t.end for t in pipeline.tasks)
    for actor, ranks in enumerate(pipeline.actors):
        told = [t for t in pipeline.tasks if t.actor == actor and t.kind != "R"]
        for rank in ranks:
            shown = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in file.of("tasks", rank)]
            assert len(shown) == len(told)
            for (name, start, seconds), task in zip(shown, told, strict=True):
                assert name.startswith(f"{task.stage}{task.kind}")
                assert start == pytest.approx(before + task.start, abs=2e-9)
                assert seconds == pytest.approx(task.end - task.start, abs=2e-9)
    sent = [e for e in file.content["traceEvents"] if e["ph"] == "s"]
    assert len(sent) == len(pipeline.transfers) * len(pipeline.actors[0])


def test_a_stage_waits_until_another_sends(tmp_path):
    found = report("stages")
    file = drawn(found, tmp_path)
    first = next(s for s in found.pipeline.transfers if s.target == 1)
    before = found.cost.seconds - max(t.end for t in found.pipeline.tasks)
    for rank in found.pipeline.actors[1]:
        wait, *_ = file.waits(rank)
        assert (wait["name"], wait["args"]) == ("waiting for stage 0", {"for": "1F0"})
        end = (wait["ts"] + wait["dur"]) / 1e6
        assert wait["ts"] / 1e6 == pytest.approx(before, abs=2e-9)
        assert end == pytest.approx(before + first.start, abs=2e-9)
    # What waits computes nothing meanwhile.
    for wait in file.waits():
        busy = file.of("tasks", wait["pid"])
        assert not any(
            e["ts"] < wait["ts"] + wait["dur"] - 0.01 and wait["ts"] < e["ts"] + e["dur"] - 0.01
            for e in busy
        )


def test_of_very_many_ranks_one_stands_for_those_that_do_the_same(tmp_path):
    found = report("one piece")
    mesh = (dataclasses.replace(found.facts.mesh[0], size=MOST_RANKS * 2), *found.facts.mesh[1:])
    ranks = MOST_RANKS * 2
    for axis in found.facts.mesh[1:]:
        ranks *= axis.size
    many = dataclasses.replace(found.facts, mesh=mesh, ranks=ranks)
    file = drawn(dataclasses.replace(found, facts=many), tmp_path)
    assert file.processes == {0: f"ranks 0 to {ranks - 1}"}
    assert "one rank for each set" in file.content["otherData"]["shown"]
    assert all("group" not in e["args"] for e in file.collectives())


# --- the command -----------------------------------------------------------------------


def test_the_command_reads_the_plans_file_alone(tmp_path, capsys):
    planned("stages").save(tmp_path / "p.json")
    assert main(["timeline", str(tmp_path / "p.json"), "-o", str(tmp_path / "t.json")]) == 0
    printed = capsys.readouterr().out
    assert "on 4 ranks, every rank" in printed and "ui.perfetto.dev" in printed
    file = TimelineFile(tmp_path / "t.json")
    assert end_of(file.slices) == pytest.approx(planned("stages").cost.seconds, rel=1e-4)


def test_what_is_no_plan_with_prices_is_refused(tmp_path, capsys):
    path, out = tmp_path / "p.json", tmp_path / "t.json"

    def told(plan: str = str(path), output: Path = out) -> str:
        assert main(["timeline", plan, "-o", str(output)]) == 2
        assert not out.exists()
        return capsys.readouterr().err

    assert "There is no plan file" in told("nowhere.json")
    plan = planned("one piece")
    path.write_text(plan.to_json())  # as it was before plans had reports
    assert "has no report" in told()
    dataclasses.replace(plan, cluster=None).with_findings(cost=None).save(path)
    assert "has no prices" in told()
    plan.save(path)
    assert "it is a folder" in told(output=tmp_path)
    content = json.loads(path.read_text())
    content["report"]["version"] = 99
    path.write_text(json.dumps(content))
    assert "version 99" in told()


def large() -> Report:
    """The report of a plan for a model of 96 blocks, on 8 stages of 128 ranks each."""
    found, blocks, stages, micro, ranks = report("stages"), 96, 8, 32, 128
    some = [layer for layer in found.layers if layer.seconds.total]
    layers, collectives = [], []
    for block in range(blocks):
        for i, layer in enumerate(some[:12]):
            path = f"block_{block}/{i}"
            layers.append(dataclasses.replace(layer, path=path, stage=block * stages // blocks))
            collectives += [
                dataclasses.replace(found.collectives[0], layer=path, phase=phase, when="between")
                for phase in ("forward", "backward")
            ]
    tasks = [
        TaskSummary(1e-3 * (s + m + 100 * b), 1e-3 * (s + m + 100 * b + 1), s, s, "FB"[b], m)
        for b in (0, 1)
        for m in range(micro)
        for s in range(stages)
    ]
    sent = [
        TransferSummary(t.end, t.end + 1e-3, t.stage, t.stage + 1, t.microbatch, 1e6)
        for t in tasks
        if t.kind == "F" and t.stage < stages - 1
    ]
    actors = tuple(tuple(range(s * ranks, (s + 1) * ranks)) for s in range(stages))
    pipeline = dataclasses.replace(
        found.pipeline,
        actors=actors,
        actor_of_stage=tuple(range(stages)),
        tasks=tuple(sorted(tasks, key=lambda t: t.start)),
        transfers=tuple(sent),
    )
    cost = dataclasses.replace(found.cost, seconds=max(t.end for t in tasks))
    mesh = (dataclasses.replace(found.facts.mesh[0], size=ranks), *found.facts.mesh[1:])
    facts = dataclasses.replace(found.facts, mesh=mesh, ranks=ranks * stages)
    return dataclasses.replace(
        found,
        layers=tuple(layers),
        collectives=tuple(collectives),
        pipeline=pipeline,
        cost=cost,
        facts=facts,
    )


@pytest.mark.slow
def test_a_large_plan_takes_seconds(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(large().to_builtins()))
    program = (
        "import json, os, re, sys; from tfpar.observability.report.data.schema import read_report; "
        "from tfpar.observability.timeline.predicted import predicted_trace; "
        "report = read_report(json.load(open(sys.argv[1])), 'r.json'); "
        "predicted_trace(report).save(sys.argv[2]); "
        # Its own peak: that of getrusage is the parent's where that is larger.
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]; "
        "print(sum(os.times()[:2]), int(peak) / 2**20)"
    )
    arguments = [str(tmp_path / "r.json"), str(tmp_path / "t.json")]
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=time_limit(120),
    )
    assert ended.returncode == 0, ended.stderr
    seconds, gigabytes = map(float, ended.stdout.splitlines()[-1].split())
    assert seconds < 10 and gigabytes < 1, (seconds, gigabytes)
    events = json.loads((tmp_path / "t.json").read_bytes())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len({e["pid"] for e in slices}) == 8  # one for each stage
    assert end_of(slices) == pytest.approx(large().cost.seconds, rel=1e-4)


def test_a_report_without_prices_is_refused():
    with pytest.raises(PlanError, match="has no prices"):
        predicted_trace(dataclasses.replace(report("one piece"), cost=None))
