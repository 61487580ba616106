"""Planning as users ask for it: names, machines, plan files; and what is shown meanwhile."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import sys
import types

import keras
import numpy as np
import pytest

import tfpar as tap
from benchmarks import models
from tests.cases import nightly
from tests.planning.test_cache import problem
from tests.time_limits import time_limit
from tfpar import api, progress
from tfpar.cluster import find_cluster
from tfpar.planning import Budget
from tfpar.planning.intra_op import TapPlanner, find_planner, make_budget
from tfpar.plans import Plan
from tfpar.spec import Mesh, PlanError, TfparError, format_seconds
from tfpar.tf.distributed import Job

MESH = Mesh.of([2, 2])


def build(activation="relu", optimizer="adam", loss="mse"):
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation, name="fc1"),
            keras.layers.Dense(2, name="fc2"),
        ],
        name="mlp",
    )
    model.compile(optimizer, loss, jit_compile=False)
    return model


def data(batch=8):
    return np.ones((batch, 6), "float32"), np.ones((batch, 2), "float32")


def planned(batch=8, mesh=MESH, cluster="dgx-a100", **arguments) -> Plan:
    return api.plan(build, data(batch), mesh, cluster, **arguments)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


# --- planners and machines -------------------------------------------------------------


def test_planners_by_name():
    assert isinstance(find_planner("tap"), TapPlanner)
    assert find_planner("auto").name == "auto"
    own = TapPlanner(3)
    assert find_planner(own) is own and find_planner(None) is None
    with pytest.raises(TfparError, match="no planner 'best'. There are 'auto', 'tap', 'rhino'"):
        find_planner("best")
    assert find_planner("rhino", level=2).name == "rhino level 2"
    with pytest.raises(TfparError, match="level is for planner='rhino', not for planner='tap'"):
        find_planner("tap", level=2)
    with pytest.raises(TfparError, match="level is for planner='rhino', not for planner=Tap"):
        find_planner(own, level=2)
    assert make_budget(own, 9.0) == Budget(9.0) and make_budget(None, None) == Budget()
    with pytest.raises(TfparError, match="search_seconds is for a planner"):
        make_budget(None, 9.0)


@pytest.mark.parametrize("ask", [planned, lambda **a: tap.auto_parallel(MESH, **a)])
def test_an_unknown_planner_is_refused(ask):
    with pytest.raises(TfparError, match="no planner 'best'"):
        ask(planner="best")


def test_a_plan_needs_a_planner_and_a_compiled_model():
    with pytest.raises(TfparError, match="needs a planner"):
        planned(planner=None)
    for wrong in (lambda: None, lambda: keras.Sequential([keras.layers.Dense(2)])):
        with pytest.raises(TfparError, match="makes and compiles a Keras model"):
            api.plan(wrong, data(), MESH, "dgx-a100")


@pytest.mark.parametrize("ask", [planned, lambda mesh, **a: tap.auto_parallel(mesh, **a)])
def test_a_cluster_that_is_too_small_names_both(ask):
    pair = dataclasses.replace(find_cluster("dgx-a100", Mesh.of([2])), name="pair")
    with pytest.raises(TfparError, match="data=2 x model=2 has 4 ranks.*'pair' has 2 devices"):
        ask(mesh=MESH, cluster=pair)


# --- plan files ------------------------------------------------------------------------


def test_plan_files_keep_what_was_searched(plan):
    assert plan.cost and plan.cluster and any(v.alternatives for v in plan.variables.values())
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.diff(plan) == []
    for field in ("cost", "cluster", "planner", "variables", "fingerprint"):
        assert getattr(again, field) == getattr(plan, field)
    json.loads(plan.to_json(), parse_constant=pytest.fail)  # Infinity and NaN are no JSON


def test_an_alternative_that_is_not_valid_is_standard_json(plan):
    name, variable = next((n, v) for n, v in plan.variables.items() if v.alternatives)
    first, *rest = variable.alternatives
    never = dataclasses.replace(first, seconds=math.inf)
    changed = dataclasses.replace(variable, alternatives=(*rest, never))
    plan = dataclasses.replace(plan, variables={**plan.variables, name: changed})
    text = plan.to_json()
    json.loads(text, parse_constant=pytest.fail)
    assert Plan.from_json(text).variables[name] == changed


def test_a_plan_for_other_ranks_or_machines_is_refused(plan):
    plan.check_ranks(MESH)
    plan.check_ranks(Mesh.of([4]), find_cluster("dgx-a100", MESH))
    with pytest.raises(PlanError, match="is for 4 ranks .*, not for the 8 of data=8"):
        plan.check_ranks(Mesh.of([8]))
    plan.check_ranks(MESH, find_cluster("dgx-a100", MESH).with_memory(16e9))
    with pytest.raises(PlanError, match="for cluster 'dgx-a100', which is not 'rhino-m8'"):
        plan.check_ranks(MESH, find_cluster("rhino-m8", MESH))
    with pytest.raises(PlanError, match="for cluster 'dgx-a100'"):
        tap.auto_parallel(MESH, plan=plan, cluster="cpu")
    with pytest.raises(PlanError, match="is for 4 ranks"):
        tap.auto_parallel([2], plan=plan)


def fit(plan, batch=8, **arguments):
    with tap.auto_parallel(plan=plan):
        model = build(**arguments)
    model.fit(*data(batch), batch_size=batch, verbose=0)
    return model


@pytest.fixture(scope="module")
def plan_file(plan, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("plan") / "plan.json")
    plan.save(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "optimizer"),
    [nightly(8, "adam"), nightly(12, "adam"), nightly(8, "sgd"), (12, "sgd")],
)
def test_a_plan_holds_for_another_batch_and_optimizer(plan_file, batch, optimizer):
    model = fit(plan_file, batch, optimizer=optimizer)
    assert tap.plan_of(model).diff(Plan.load(plan_file)) == []


@pytest.mark.parametrize("change", [{"activation": "tanh"}, nightly({"loss": "mae"})])
def test_a_plan_does_not_hold_for_another_step(plan_file, change):
    with pytest.raises(PlanError, match="for another step: .* not the ops"):
        fit(plan_file, **change)


@pytest.mark.slow
@pytest.mark.parametrize("name", [nightly("gpt"), nightly("resnet"), "wide"])
def test_fit_and_plan_find_the_same(name):
    mesh, made = Mesh.of([2, 2]), []

    def build_one():
        keras.utils.clear_session(free_memory=False)
        made.append(models.compile_model(models.SMALL[name]()))
        return made[-1]

    batch = models.batch_of(models.SMALL[name](), 8)
    ahead = api.plan(build_one, batch, mesh, "v100-ethernet")
    # By default a search takes no longer than this one step can gain.
    with tap.auto_parallel(mesh, cluster="v100-ethernet", search_seconds=time_limit(300)):
        model = build_one()
    model.fit(*batch, batch_size=8, verbose=0)
    found = tap.plan_of(model)
    assert found.fingerprint == ahead.fingerprint
    assert (found.mesh, found.batch_axes) == (ahead.mesh, ahead.batch_axes)
    specs = [{n: v.spec for n, v in p.variables.items() if v.trainable} for p in (ahead, found)]
    assert specs[0] == specs[1] and {v.path for v in model.trainable_variables} <= set(specs[0])
    # The step itself knows of moving statistics too, beside the slots of the optimizer.
    assert found.cost.seconds == pytest.approx(ahead.cost.seconds, rel=1e-4)


# --- progress --------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """The module `time` with seconds that pass only when told to."""

    def __init__(self, now: list[float]) -> None:
        self.monotonic = lambda: now[0]


def test_progress_is_quiet_where_no_one_looks(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "time", Clock(now))
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress.reporting("searching a plan", wanted=False) as report:
        now[0] = 100.0
        report.priced("data=1 x model=4", 10)
    assert sys.stderr.getvalue() == ""


def test_progress_shows_once_a_search_takes_long(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "time", Clock(now))
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress.reporting("searching a plan") as report:
        report.priced("data=1 x model=4", 10)
        assert sys.stderr.getvalue() == ""
        now[0] = 3.0
        report.priced("data=2 x model=2", 70)
    shown = sys.stderr.getvalue()
    assert "searching a plan: data=2 x model=2, 70 priced, 3 s" in shown
    assert " 10 priced" not in shown


def test_progress_says_what_is_tried_the_best_so_far_and_the_time_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "time", Clock(now))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.reporting("searching a plan") as report:
        with report.at("no stages"):
            report.found(0.5)
        now[0] = 9.0
        with report.at("2 stages, 8 microbatches"), report.at("", limit_s=20.0):
            report.found(0.7)
            now[0] = 12.0
            report.priced("data=2 x model=2", 70)
            now[0] = 13.0
            report.priced("data=4 x model=1", 80)
    assert sys.stderr.getvalue() == (
        "tfpar: searching a plan: 2 stages, 8 microbatches, data=2 x model=2, 70 priced, "
        "best step so far 500.00 ms, 12 s, 17 s left\n"
    )


def test_the_best_of_one_of_several_searches_is_told_with_it_alone(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "time", Clock(now))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.reporting("searching a plan") as report:
        for mesh, seconds in (("4", 0.5), ("2x2", 0.7)):
            with report.at(f"{mesh} on cpu", apart=True), report.at("no stages"):
                now[0] += 12.0
                report.tell("begun")
                report.found(seconds)
                now[0] += 12.0
                report.tell("priced")
    assert [line.rpartition(", ")[0] for line in sys.stderr.getvalue().splitlines()] == [
        "tfpar: searching a plan: 4 on cpu, no stages, begun",
        "tfpar: searching a plan: 4 on cpu, no stages, priced, best step so far 500.00 ms",
        "tfpar: searching a plan: 2x2 on cpu, no stages, begun",
        "tfpar: searching a plan: 2x2 on cpu, no stages, priced, best step so far 700.00 ms",
    ]


@pytest.mark.slow
def test_a_search_of_pipelines_says_which_are_tried(monkeypatch):
    seconds = itertools.count(step=11.0)
    clock = types.SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    specs = np.ones((8, 6), "float32"), np.ones((8, 2), "float32")
    found = tap.plan(build, specs, [2], "v100-ethernet", planner="tap", pipeline="auto")
    first, *others = sys.stderr.getvalue().splitlines()
    assert first.startswith("tfpar: searching a plan: no stages, ") and "best step" not in first
    assert any(": 2 stages, " in line and "best step so far" in line for line in others)
    best = format_seconds(min(c.seconds for c in (found.cost, found.findings.rivals[0].cost)))
    assert f"best step so far {best}" in others[-1]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    quiet = tap.Options(verbose=0)
    tap.plan(build, specs, [2], "v100-ethernet", planner="tap", pipeline="auto", options=quiet)
    monkeypatch.setattr(Job, "of", lambda environ: Job(rank=1, size=2))
    tap.plan(build, specs, [2], "v100-ethernet", planner="tap", pipeline="auto")
    assert sys.stderr.getvalue() == ""


def test_a_short_search_shows_nothing(monkeypatch):
    monkeypatch.setattr(progress, "time", Clock([0.0]))
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.reporting("searching a plan") as report:
        TapPlanner().solve(problem(progress=report.priced))
    assert sys.stderr.getvalue() == ""


def test_a_search_tells_what_it_prices():
    told = []
    TapPlanner().solve(problem(progress=lambda what, count: told.append((what, count))))
    counts = [count for _, count in told]
    assert counts and counts == sorted(counts) and all("data=" in what for what, _ in told)
