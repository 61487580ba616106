"""What `TFPAR_DUMP` writes while a model is planned and trained."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfpar as tap
from tfpar.compile.passes import DUMP
from tfpar.ir import parse_graph

X, Y = np.ones((8, 6), "float32"), np.ones((8, 2), "float32")


def build() -> keras.Model:
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(2, name="head")(inputs))
    model.compile("adam", "mse", jit_compile=False)
    return model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(DUMP, str(tmp_path))
    return tmp_path


def test_a_step_is_dumped_when_it_is_compiled(folder):
    with tap.auto_parallel(2, planner=None, verbose=0):
        model = build()
    for _ in range(2):
        model.train_on_batch(X, Y)
    (step,) = folder.iterdir()
    assert step.name == "train_step-0"
    graphs = {path.name[3:-4]: path.read_text() for path in step.iterdir()}
    for name in ("captured", "trim", "propagate", "rewrite", "pack-collectives"):
        assert parse_graph(graphs[name]).ops
    assert "head/kernel" in graphs["captured"]
    assert "AllReduce" in graphs["pack-collectives"] and "AllReduce" not in graphs["propagate"]
    plan = tap.plan_of(model)
    assert str(plan.partitioned) == graphs["propagate"]


def test_a_plan_is_dumped_when_it_is_searched(folder):
    plan = tap.plan(build, (X, Y), 2, "dgx-a100", planner="tap")
    (step,) = folder.iterdir()
    names = sorted(path.name[3:-4] for path in step.iterdir())
    assert step.name == "plan-0" and {"captured", "trim", "propagate"} <= set(names)
    (laid,) = step.glob("*-propagate.txt")
    assert str(plan.partitioned) == laid.read_text()
