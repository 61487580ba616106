"""What is shown once a plan is found: one line, unless it is not wanted."""

import functools
import logging

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tfpar.observability.report import why_slower
from tfpar.planning.intra_op import TapPlanner
from tfpar.spec import format_bytes, format_seconds

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
    predicted, _, slower = line.partition("predicted ")[2].partition("; ")
    seconds, _, memory = predicted.partition(", ")
    assert seconds.startswith(f"{format_seconds(plan.cost.seconds)} a step (")
    assert memory.startswith(f"{format_bytes(plan.cost.memory_bytes)} of memory a device (")
    assert seconds.endswith("on one device)") and memory.endswith("on one device)")
    assert slower == "slower than one device, which has room: constraints ask for it"
    assert f"S{slower[1:]}." in plan.summary()


@pytest.mark.slow
def test_what_is_not_split_is_said_plainly(capsys):
    model = fitted(batch_size=12)
    (line,) = capsys.readouterr().out.splitlines()
    assert not tap.plan_of(model).splits_anything()
    assert "nothing is split: one device would be as fast" in line


def test_a_plan_that_is_slower_than_one_device_says_why():
    told = functools.partial(why_slower, 1.74, 1.62, ranks=4)
    assert told(fits=False, is_constrained=True).endswith("which has no room for it")
    assert told(fits=True, is_constrained=True).endswith("constraints ask for it")
    assert told(fits=True, is_constrained=False).endswith("the mesh asks for 4 ranks")
    assert not why_slower(1.62, 1.62, ranks=4, fits=True, is_constrained=False)
    assert not why_slower(1.74, 1.62, ranks=1, fits=True, is_constrained=False)


def test_a_search_knows_how_many_steps_there_are_to_train():
    asked = []

    class Listening(TapPlanner):
        def solve(self, problem):
            asked.append(problem.aim.budget.steps)
            return super().solve(problem)

    for train, steps in (
        (lambda model: model.fit(X, Y, batch_size=8, epochs=3, verbose=0), 3 * 2),
        (lambda model: model.train_on_batch(X, Y), 10_000),
    ):
        asked.clear()
        with tap.auto_parallel([2], planner=Listening(), verbose=0):
            model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
            model.compile("sgd", "mse")
        train(model)
        assert {*asked} == {steps}


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
