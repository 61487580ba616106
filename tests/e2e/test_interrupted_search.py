"""Ctrl-C while `fit` or `tap.plan` searches: what was found is used, or is in the error."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.search.test_so_far import Interrupted, python_handles_it  # noqa: F401 - a fixture
from tfpar.search.tap.planner import TapPlanner


def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


def test_fit_after_an_interrupted_fit_trains_by_what_was_found(caplog):
    x, y = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
    planner = Interrupted(TapPlanner(), 1)
    with tap.auto_parallel([2, 2], planner=planner, cluster="v100-ethernet"):
        model = build()
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=8, verbose=0)
    model.fit(x, y, batch_size=8, verbose=0)
    assert planner.searches == 1 and tap.plan_of(model).cut_short
    assert sum("was interrupted" in line for line in caplog.messages) == 1
    with tap.auto_parallel([2, 2], planner=planner, cluster="v100-ethernet"):
        model = build()
    model.fit(x, y, batch_size=8, verbose=0)
    assert planner.searches == 2 and not tap.plan_of(model).cut_short


def test_an_interrupted_plan_is_in_the_error_and_in_no_cache(tmp_path):
    specs = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
    planner = Interrupted(TapPlanner(), 1)
    with pytest.raises(tap.SearchInterrupted) as error:
        tap.plan(build, specs, [2, 2], "v100-ethernet", planner=planner, plan_cache=str(tmp_path))
    assert error.value.plan.cut_short and "there may be better" in error.value.plan.summary()
    assert not list(tmp_path.iterdir())
