"""What is shown once a plan is found: one line, unless it is not wanted."""

import logging

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tfpar.spec.quantities import format_bytes, format_seconds

X = np.ones((12, 6), "float32")
Y = np.ones((12, 3), "float32")
COLUMNS = [tap.shard("a/kernel", dim=1, axis="model")]


def fitted(*arguments, batch_size=8, **options):
    with tap.auto_parallel(tap.split([2, 2]), *arguments, **options):
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, name="a"), layers.Dense(3, name="b")]
        )
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=batch_size, verbose=0)
    return model


@pytest.mark.slow
def test_a_line_for_each_plan_and_not_for_each_batch_shape(capsys):
    model = fitted(COLUMNS, planner="tap")  # batches of 8 and of 4
    model.evaluate(X, Y, verbose=0)
    (line,) = capsys.readouterr().out.splitlines()
    plan = tap.plan_of(model)
    assert line.startswith("tfpar: data=2 x model=2, tap planner in ")
    assert "batch split over data" in line and "of 4 weights split" in line
    seconds, memory, rest = line.partition("predicted ")[2].partition(", ")[::2] + ("",)
    assert seconds.startswith(f"{format_seconds(plan.cost.seconds)} a step (")
    assert memory.startswith(f"{format_bytes(plan.cost.memory_bytes)} of memory a device (")
    assert seconds.endswith("on one device)") and memory.endswith("on one device)") and not rest


@pytest.mark.slow
def test_what_is_not_split_is_said_plainly(capsys):
    model = fitted(batch_size=12)
    (line,) = capsys.readouterr().out.splitlines()
    assert not tap.plan_of(model).splits_anything()
    assert "nothing is split: one device would be as fast" in line


def test_plans_that_are_not_searched(capsys, tmp_path):
    model = fitted(COLUMNS, planner=None, batch_size=12)
    (line,) = capsys.readouterr().out.splitlines()
    assert (
        line == "tfpar: data=2 x model=2, no planner: batch split over data, 3 of 4 weights split"
    )
    tap.plan_of(model).save(tmp_path / "plan.json")
    fitted(plan=tmp_path / "plan.json", verbose=0, batch_size=12)
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_a_log_that_shows_such_lines_has_it_instead(capsys, caplog):
    caplog.set_level(logging.INFO, "tfpar")
    fitted(COLUMNS, planner=None, batch_size=12)
    assert any("3 of 4 weights split" in r.getMessage() for r in caplog.records)
    assert not capsys.readouterr().out
