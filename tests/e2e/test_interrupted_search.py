"""Ctrl-C while `fit` or `tap.plan` searches: what was found is used, or is in the error."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.planning.test_incumbent import Interrupted, python_handles_it  # noqa: F401 - a fixture
from tfpar.planning.inter_op import assign_stages
from tfpar.planning.intra_op import TapPlanner


def build():
    layers = [keras.layers.Dense(8, name="first"), keras.layers.Dense(3, name="second")]
    model = keras.Sequential([keras.Input((6,)), *layers], name="net")
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
def test_fit_after_an_interrupted_fit_trains_by_what_was_found(caplog):
    x, y = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
    planner = Interrupted(TapPlanner(), 1)
    with tap.auto_parallel([2, 2], planner=planner, cluster="v100-ethernet"):
        model = build()
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=8, verbose=0)
    model.fit(x, y, batch_size=8, verbose=0)
    assert planner.searches == 1 and tap.plan_of(model).findings.cut_short
    assert sum("was interrupted" in line for line in caplog.messages) == 1
    with tap.auto_parallel([2, 2], planner=planner, cluster="v100-ethernet"):
        model = build()
    model.fit(x, y, batch_size=8, verbose=0)
    assert planner.searches == 2 and not tap.plan_of(model).findings.cut_short


def test_an_interrupted_plan_is_in_the_error_and_in_no_cache(tmp_path):
    specs = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
    planner = Interrupted(TapPlanner(), 1)
    with pytest.raises(tap.SearchInterrupted) as error:
        tap.plan(build, specs, [2, 2], "v100-ethernet", planner=planner, plan_cache=str(tmp_path))
    assert (
        error.value.plan.findings.cut_short and "there may be better" in error.value.plan.summary()
    )
    assert not list(tmp_path.iterdir())


def in_two_stages(**options):
    return {
        "pipeline": tap.Pipeline(stages=2, microbatches=2),
        "cluster": "v100-ethernet",
        **options,
    }


def fitted_by(plan: tap.Plan) -> tap.Plan:
    """The plan that a model trains by when it is given this one."""
    with tap.auto_parallel(plan=plan, verbose=0):
        model = build()
    model.fit(np.ones((8, 6), "float32"), np.ones((8, 3), "float32"), batch_size=8, verbose=0)
    return tap.plan_of(model)


@pytest.mark.slow
def test_an_interrupted_plan_of_a_pipeline_has_stages_and_runs():
    specs = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
    planner = Interrupted(TapPlanner(), 1)
    with pytest.raises(tap.SearchInterrupted) as error:
        tap.plan(build, specs, [4], planner=planner, **in_two_stages())
    plan = error.value.plan
    assert (
        plan.findings.cut_short and plan.num_ranks == 4 and {*plan.stages.owners.values()} == {0, 1}
    )
    assert plan.cost.seconds == plan.stages.cost.seconds
    used = fitted_by(plan)
    assert used.findings.cut_short and used.stages.schedule == plan.stages.schedule


def test_an_interrupted_plan_of_which_no_stage_fits_is_none():
    specs = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
    with pytest.raises(tap.SearchInterrupted) as error:
        tap.plan(
            build,
            specs,
            [4],
            planner=Interrupted(TapPlanner(), 1),
            memory_limit=200.0,  # room for all, but not where stages have it
            **in_two_stages(),
        )
    assert error.value.plan is None


def test_a_search_that_stages_interrupt_ends_with_its_plan(monkeypatch):
    """Ctrl-C while stages are found: these are found in little time, when the plan is asked for."""
    asked = []

    def interrupted(*arguments, deadline, **options):
        asked.append(deadline.left)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return assign_stages(*arguments, deadline=deadline, **options)

    monkeypatch.setattr("tfpar.planning.step_search.assign_stages", interrupted)
    specs = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
    with pytest.raises(tap.SearchInterrupted) as error:
        tap.plan(build, specs, [4], planner="tap", **in_two_stages())
    plan = error.value.plan
    assert plan.findings.cut_short and {*plan.stages.owners.values()} == {0, 1}
    assert len(asked) == 2 and asked[1] <= 1.0


@pytest.mark.slow
def test_a_pipeline_whose_search_runs_out_of_time_has_stages():
    specs = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
    plan = tap.plan(build, specs, [4], planner="tap", search_seconds=1e-9, **in_two_stages())
    assert plan.findings.cut_short and plan.stages.cost is not None
    assert fitted_by(plan).findings.cut_short


@pytest.mark.slow
@pytest.mark.parametrize("when", ["tap", "pricing", "explaining"])
def test_fit_after_an_interrupted_search_of_pipelines_takes_what_that_had_found(
    when, caplog, monkeypatch
):
    """Ctrl-C while two stages are searched, or priced, or when all is found: that is used."""
    x, y = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
    searched = []

    class InTheSecond(TapPlanner):
        def solve(self, problem):
            searched.append(problem)
            if len(searched) == 2 and when == "tap":
                raise KeyboardInterrupt
            return super().solve(problem)

    def interrupted(*_):
        raise KeyboardInterrupt

    if when == "pricing":
        monkeypatch.setattr("tfpar.planning.step_search.reprice_plan", interrupted)
    if when == "explaining":
        monkeypatch.setattr("tfpar.planning.pipeline_search.attach_idle_times", interrupted)
    options = {"pipeline": "auto", "cluster": "v100-ethernet", "verbose": 0}
    with tap.auto_parallel([4], planner=InTheSecond(), **options):
        model = build()
    with pytest.raises(tap.SearchInterrupted) as error:
        model.fit(x, y, batch_size=8, verbose=0)
    found = error.value.plan
    assert found.findings.cut_short and bool(found.findings.rivals) == (when != "tap")
    count = len(searched)
    model.fit(x, y, batch_size=8, verbose=0)
    plan = tap.plan_of(model)
    assert len(searched) == count and plan.findings.cut_short and plan.mesh == found.mesh
    assert sum("was interrupted" in line for line in caplog.messages) == 1


def test_fit_after_an_interrupted_fit_of_a_pipeline_has_stages():
    x, y = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
    planner = Interrupted(TapPlanner(), 1)
    with tap.auto_parallel([4], planner=planner, verbose=0, **in_two_stages()):
        model = build()
    with pytest.raises(tap.SearchInterrupted):
        model.fit(x, y, batch_size=8, verbose=0)
    model.fit(x, y, batch_size=8, verbose=0)
    plan = tap.plan_of(model)
    assert (
        planner.searches == 1
        and plan.findings.cut_short
        and {*plan.stages.owners.values()} == {0, 1}
    )
