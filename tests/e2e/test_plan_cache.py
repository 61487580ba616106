"""A folder of plans that users name: `fit` and `tap.plan` search a problem once."""

from __future__ import annotations

import os
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tests.search.test_cache import MESH, Counting
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
    assert len(planner.problems) == len(os.listdir(folder)) == 4


@pytest.mark.slow
def test_the_environment_names_a_folder(tmp_path, monkeypatch):
    planner, folder = Counting(), tmp_path / "plans"
    monkeypatch.setenv("TFPAR_PLAN_CACHE", str(folder))
    fit(planner=planner)
    assert len(os.listdir(folder)) == 1
    fit(planner=planner)
    assert len(planner.problems) == 1
    api.plan(build, (X, Y), MESH, "dgx-a100", planner=planner)
    api.plan(build, (X, Y), MESH, "dgx-a100", planner=planner)
    searched = len(planner.problems)
    assert searched == len(os.listdir(folder))
    fit(planner=planner, plan_cache=str(tmp_path / "named"))  # an argument goes before it
    assert len(planner.problems) == searched + 1 == len(os.listdir(folder)) + 1
    assert len(list(Path(tmp_path / "named").iterdir())) == 1
