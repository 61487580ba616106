"""Files that need no TensorFlow: each kind with valid samples, and what a user does with one.

A file that is accepted has to work: what is written of it is read again as the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.fuzzing import samples
from scripts.fuzzing.mutators import mutate
from scripts.fuzzing.trials import Case, Draw, Kind
from tfpar.cli import make_parser
from tfpar.cluster.files import cluster_of, describe, read_cluster, write_cluster
from tfpar.cluster.lookup import find_cluster, fit_to_mesh, preset_names
from tfpar.hints import read_hints
from tfpar.ir.text.reader import parse_graph
from tfpar.ir.text.writer import format_graph
from tfpar.jobs.launch.hosts import read_hostfile
from tfpar.observability.report.data.build import build_report
from tfpar.observability.timeline.trace import Slice, Trace
from tfpar.pipeline import Schedule
from tfpar.pipeline.generators import generate
from tfpar.planning.cache import PROBLEM, PlanCache
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.plans import Plan
from tfpar.spec import Mesh, TfparError
from tfpar.tf.checkpoint import lock


def of_files(given: Sequence[bytes], names: Sequence[str], use: Callable[[str], None]) -> Case:
    """Cases that write a mutated sample to a file, and use it.

    Args:
        names: of the files, which may say what they hold.
    """

    def attempt(draw: Draw) -> None:
        path = os.path.abspath(draw.choice(names))
        content = mutate(draw.choice(given), draw)
        draw.tell(content)
        Path(path).write_bytes(content)
        use(path)

    for sample in given:  # which is whole
        Path(names[0]).write_bytes(sample)
        use(os.path.abspath(names[0]))
    return attempt


# --- plans -------------------------------------------------------------------------------


def _plans(folder: str) -> Case:
    texts = [plan.to_json().encode() for plan in (samples.planned(), samples.planned_in_stages())]
    return of_files(texts, ["plan.json"], _use_plan)


def _use_plan(path: str) -> None:
    plan = Plan.load(path)
    assert plan.summary() and plan.summary(full=True) and all(map(plan.explain, plan.variables))
    assert plan.diff(plan) == []
    assert len(plan.diff(samples.planned())) == len(samples.planned().diff(plan))
    plan.save("again.json")
    again = Path("again.json").read_text(encoding="utf-8")
    json.loads(again, parse_constant=_no_number)
    assert Plan.load("again.json") == plan and Plan.load("again.json").to_json() == again


def _reports(folder: str) -> Case:
    """What is mutated is the report of a plan, in the plan's file."""
    plan = samples.planned_with_report()
    assert plan.report is not None

    def use(path: str) -> None:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
        whole = plan.with_report({}).to_json()
        Path("plan.json").write_text(whole.replace('"report": {}', f'"report": {text}'))
        commanded("report", "plan.json", "-o", "page.html")
        commanded("explain", "plan.json", *list(plan.variables)[:2])
        commanded("show", "plan.json")

    return of_files([json.dumps(plan.report).encode()], ["report.json"], use)


def _timelines(folder: str) -> Case:
    text = samples.planned_with_report().to_json().encode()
    return of_files(
        [text], ["plan.json"], lambda path: commanded("timeline", path, "-o", "timeline.json")
    )


def _measured(folder: str) -> Case:
    """A timeline that a report shows a step of."""
    plan = samples.planned_with_report()
    Path("plan.json").write_text(plan.to_json())
    trace, told = Trace({0: "rank 0"}), {"step": 10}
    trace.add(Slice(0, "steps", "step 10", 0.0, 0.02))
    trace.add(Slice(0, "compute", build_report(plan).layers[0].path, 0.0, 0.01, "forward", told))
    text = json.dumps(trace.to_builtins()).encode()
    return of_files(
        [text],
        ["t.json"],
        lambda path: commanded("report", "plan.json", "-o", "page.html", "--timeline", path),
    )


def _problems(folder: str) -> Case:
    """What lies beside the plans of a cache."""
    cache, problem, other = PlanCache(folder), samples.problem(8), samples.problem(16)
    cache.put(problem, TapPlanner(), samples.planned())
    (name,) = (name for name in os.listdir(folder) if name.endswith(PROBLEM))
    sample = Path(name).read_bytes()
    return of_files([sample], [name], lambda path: _any_text(cache.nearest(other, TapPlanner())))


def _any_text(text: str) -> None:
    assert isinstance(text, str)


# --- clusters, constraints, schedules ----------------------------------------------------


def _clusters(folder: str) -> Case:
    write_cluster(samples.cluster(), "cluster.toml")
    toml = Path("cluster.toml").read_bytes()
    described = json.dumps(samples.described_cluster()).encode()
    in_toml = of_files([toml], ["cluster.toml"], _use_cluster)
    in_json = of_files([described], ["cluster.json"], _use_cluster)
    return lambda draw: draw.choice((in_toml, in_json))(draw)


def _presets(folder: str) -> Case:
    presets = importlib.resources.files("tfpar.cluster.presets")
    files = [presets / f"{name}.toml" for name in preset_names()]
    texts = [file.read_bytes() for file in files if file.is_file()]

    def use(path: str) -> None:
        _use_cluster(path)
        assert fit_to_mesh(find_cluster(path), Mesh.of([1, 1])).device

    return of_files(texts, ["preset.toml"], use)


def _use_cluster(path: str) -> None:
    found = read_cluster(path)
    assert found.device and found.shape_text() and found.fingerprint() and hash(found)
    write_cluster(found, "again.toml")
    assert read_cluster("again.toml") == found
    assert cluster_of(json.loads(json.dumps(describe(found)), parse_constant=_no_number)) == found


def _hints(folder: str) -> Case:
    samples.planned().save("old.json")

    def use(path: str) -> None:
        constraints = read_hints(path)
        with contextlib.suppress(TfparError):  # which fit no variable
            samples.constrained(constraints)

    return of_files([samples.HINTS.encode()], ["hints.toml"], use)


def _schedules(folder: str) -> Case:
    made = [generate(name, 2, 4) for name in ("1f1b", "zb-h1")]

    def use(path: str) -> None:
        schedule = Schedule.load(path)
        assert schedule.num_stages and schedule.num_microbatches and schedule.actors
        schedule.save("again.csv")
        assert Schedule.load("again.csv") == schedule

    return of_files([str(schedule).encode() for schedule in made], ["schedule.csv"], use)


# --- the rest ----------------------------------------------------------------------------


def _graphs(folder: str) -> Case:
    def use(path: str) -> None:
        with open(path, encoding="utf-8", errors="replace") as file:
            graph = parse_graph(file.read())
        assert format_graph(parse_graph(format_graph(graph))) == format_graph(graph)

    return of_files([format_graph(samples.step(8)).encode()], ["graph.txt"], use)


def _hosts(folder: str) -> Case:
    sample = b"# ours\nnode1 slots=4\nnode2:4\n\nnode3\n"
    return of_files([sample], ["hosts"], lambda path: _any_hosts(read_hostfile(path)))


def _any_hosts(hosts: Sequence[object]) -> None:
    assert hosts


def _locks(folder: str) -> Case:
    lock.PATIENCE_S = lock._SETTLED_S = 0.0
    own = lock.Owner.of_this_process()
    given = [own, dataclasses.replace(own, host="elsewhere"), dataclasses.replace(own, pid=1)]

    def use(path: str) -> None:
        lock.FolderLock(folder).release()

    texts = [json.dumps(dataclasses.asdict(owner)).encode() for owner in given]
    return of_files(texts, [lock.LOCK], use)


def commanded(*argv: str) -> None:
    """Run a command as the command line does, but for what it makes of errors."""
    with contextlib.redirect_stdout(io.StringIO()):
        options = make_parser().parse_args(argv)
        options.run(options)


def _no_number(name: str) -> None:
    raise AssertionError(f"{name} is written")


KINDS = (
    Kind("plan", _plans),
    Kind("report", _reports),
    Kind("timeline", _timelines),
    Kind("measured", _measured),
    Kind("problem", _problems),
    Kind("cluster", _clusters),
    Kind("preset", _presets),
    Kind("hints", _hints),
    Kind("schedule", _schedules),
    Kind("graph", _graphs),
    Kind("hosts", _hosts),
    Kind("lock", _locks),
)
