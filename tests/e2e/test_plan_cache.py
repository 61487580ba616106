"""A folder of plans that users name: `fit` and `tap.plan` search a problem once."""

from __future__ import annotations

import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tests.planning.test_cache import MESH, Counting, kept
from tfpar import api

X, Y = np.ones((8, 6), "float32"), np.ones((8, 2), "float32")


def build():
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, name="fc")], name="m")
    model.compile("sgd", "mse", jit_compile=False)
    return model


def fit(**arguments):
    with tap.auto_parallel(MESH, cluster="dgx-a100", **arguments):
        model = build()
    model.fit(X, Y, batch_size=8, verbose=0)
    return tap.plan_of(model)


@pytest.mark.slow
def test_fit_searches_once(tmp_path):
    planner = Counting()
    plans = [fit(planner=planner, plan_cache=str(tmp_path)) for _ in range(2)]
    assert len(planner.problems) == 1 and plans[0].diff(plans[1]) == []


def test_plan_searches_once(tmp_path):
    planner = Counting()
    plans = [
        api.plan(build, (X, Y), MESH, "dgx-a100", planner=planner, plan_cache=str(tmp_path))
        for _ in range(2)
    ]
    assert len(planner.problems) == 1 and plans[0].diff(plans[1]) == []


@pytest.mark.slow
def test_another_constraint_or_batch_of_a_model_is_searched(tmp_path):
    planner, folder = Counting(), str(tmp_path)
    halves = [tf.TensorSpec((4, 6)), tf.TensorSpec((4, 2))]
    for batch, constraints in (
        ((X, Y), ()),
        (halves, ()),
        ((X, Y), [tap.shard("fc/kernel", 0, "model")]),
        ((X, Y), [tap.shard("fc/kernel", 1, "model")]),
    ):
        for _ in range(2):
            api.plan(
                build, batch, MESH, "dgx-a100", constraints, planner=planner, plan_cache=folder
            )
    assert len(planner.problems) == len(kept(folder)) == 4


@pytest.mark.slow
def test_the_environment_names_a_folder(tmp_path, monkeypatch):
    planner, folder = Counting(), tmp_path / "plans"
    monkeypatch.setenv("TFPAR_PLAN_CACHE", str(folder))
    fit(planner=planner)
    assert len(kept(folder)) == 1
    fit(planner=planner)
    assert len(planner.problems) == 1
    api.plan(build, (X, Y), MESH, "dgx-a100", planner=planner)
    api.plan(build, (X, Y), MESH, "dgx-a100", planner=planner)
    searched = len(planner.problems)
    assert searched == len(kept(folder))
    fit(planner=planner, plan_cache=str(tmp_path / "named"))  # an argument goes before it
    assert len(planner.problems) == searched + 1 == len(kept(folder)) + 1
    assert len(kept(tmp_path / "named")) == 1


@pytest.mark.slow
def test_what_has_changed_is_told_once(tmp_path, capsys):
    folder = str(tmp_path / "plans")
    for size in (8, 16, 16):
        batch = tf.TensorSpec((size, 6)), tf.TensorSpec((size, 2))
        api.plan(build, batch, MESH, "dgx-a100", planner="tap", plan_cache=folder)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"tfpar: no cached plan: of \d+ in {folder} the nearest differs by the batch \(8 -> 16\)",
        line,
    )
    quiet = tap.Options(verbose=0)
    halves = tf.TensorSpec((4, 6)), tf.TensorSpec((4, 2))
    api.plan(build, halves, MESH, "dgx-a100", planner="tap", plan_cache=folder, options=quiet)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_the_log_has_it_where_that_shows_such_lines(tmp_path, capsys, caplog):
    folder = str(tmp_path / "plans")
    with caplog.at_level(logging.INFO, "tfpar"):
        for size in (8, 16):
            batch = tf.TensorSpec((size, 6)), tf.TensorSpec((size, 2))
            api.plan(build, batch, MESH, "dgx-a100", planner="tap", plan_cache=folder)
    assert any("differs by the batch (8 -> 16)" in r.message for r in caplog.records)
    assert capsys.readouterr().err == ""
