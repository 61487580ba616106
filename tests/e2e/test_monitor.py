"""`tap.Monitor`: what it reports is what happened, and a new plan changes no number."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import math
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.e2e.test_pipelines_found import deep, machines, rows
from tests.slow_links import slow_all_reduces
from tfpar.spec import ArgumentError, TfparError
from tfpar.tf.keras import parallel_model
from tfpar.tf.runtime import InProcessProgram

WIDTH, CLASSES = 6, 3


def small() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    h = layers.Dropout(0.2, seed=3)(layers.Dense(8, "relu", name="first")(inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES, name="last")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"], jit_compile=False)
    return model


def parallel(**options: Any) -> keras.Model:
    asked = {"planner": "tap", "cluster": "cpu", "verbose": 0, **options}
    with tap.auto_parallel([2], **asked):
        return small()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "monitor.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_figures_are_in_logs_and_files_whatever_the_order_of_callbacks(tmp_path):
    """Nine batches an epoch, the last one smaller."""
    model, table = parallel(), tmp_path / "table.csv"
    seen: list[dict[str, float]] = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs))
    )
    callbacks = [look, keras.callbacks.CSVLogger(str(table)), tap.Monitor(tmp_path, every=4)]
    history = model.fit(*rows(68, WIDTH), batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    names = {
        *("step_ms", "samples_per_s", "mfu", "data_ms", "moved_mb"),
        *("predicted_over_measured", "process_peak_mb"),
    }
    assert names < history.history.keys()
    with table.open() as file:
        written = list(csv.DictReader(file))
    for name in names:
        assert [float(row[name]) for row in written] == history.history[name]
    assert "step_ms" not in seen[2] and names < seen[3].keys()

    found = lines(tmp_path)
    reports = [line for line in found if "span" in line]
    # The first step compiles, the second warms up, and so do the first two smaller batches.
    spans = [(line["epoch"], line["step"], line["span"], line["timed_steps"]) for line in reports]
    assert spans == [
        (0, 4, "steps", 2),
        (0, 8, "steps", 4),
        (0, 9, "epoch", 6),
        (1, 12, "steps", 2),
        (1, 16, "steps", 4),
        (1, 18, "epoch", 8),
    ]
    plan = tap.plan_of(model)
    full, last = reports[1], history.history
    seconds = full["step_ms"] / 1e3
    assert full["samples_per_s"] == pytest.approx(8 / seconds)
    assert full["predicted_over_measured"] == pytest.approx(plan.cost.seconds / seconds)
    # Forward, and two products backward but for the first layer's inputs.
    flops = 2 * 8 * (3 * 8 * CLASSES + 2 * WIDTH * 8)
    peak = 2 * plan.cluster.device.flops["float32"]
    assert full["mfu"] == pytest.approx(flops / peak / seconds)
    # The smaller batch counts as what it is.
    mean_batch = (7 * 8 + 4) / 8
    assert last["samples_per_s"][1] * last["step_ms"][1] / 1e3 == pytest.approx(mean_batch)
    assert full["process_peak_mb"] > 50


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed"
)
def test_scalars_are_what_lines_say(tmp_path):
    callback = tap.Monitor(tmp_path, every=4)
    parallel().fit(*rows(72, WIDTH), batch_size=8, verbose=0, callbacks=[callback])
    (file,) = tmp_path.glob("*tfevents*")
    found = {
        (event.step, value.tag): float(tf.make_ndarray(value.tensor))
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }
    for line in lines(tmp_path):
        group = {"steps": "monitor", "epoch": "monitor_epoch"}[line["span"]]
        for name in ("step_ms", "mfu"):
            assert found.pop((line["step"], f"{group}/{name}")) == pytest.approx(line[name])


@pytest.mark.slow
def test_a_step_that_waits_for_data_is_told_of(tmp_path, capsys):
    x, y = rows(8, WIDTH)

    def slowly():
        for _ in range(24):
            time.sleep(0.02)
            yield x, y

    signature = (tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, y.dtype))
    data = tf.data.Dataset.from_generator(slowly, output_signature=signature)
    model = parallel(verbose=1)
    model.fit(data, verbose=0, callbacks=[tap.Monitor(tmp_path)])
    report, line = (
        next(line for line in lines(tmp_path) if key in line) for key in ("span", "verdict")
    )
    assert line["step"] == 22 and ": waiting for data takes " in line["verdict"]
    assert line["verdict"] in capsys.readouterr().out
    waited = next(part for part in line["parts"] if part["name"] == "waiting for data")
    assert waited["predicted_ms"] == 0 and 15 < waited["measured_ms"]
    assert 15 < report["data_ms"] < report["step_ms"]


@pytest.mark.slow
def test_the_parts_of_a_step_are_what_it_took(tmp_path):
    """Collectives are timed by themselves; what is left is the rest of the step."""
    model = parallel(constraints=tap.batch("data"))
    x, y = rows(8 * 24, WIDTH)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[tap.Monitor(tmp_path, every=50)])
    (line,) = [line for line in lines(tmp_path) if "verdict" in line]
    names = [part["name"] for part in line["parts"]]
    assert names == ["waiting for data", "all_reduce over data", "all but collectives (compute)"]
    data, reduced, rest = line["parts"]
    assert reduced["measured_ms"] > 0 and rest["measured_ms"] > 0
    predicted = sum(part["predicted_ms"] for part in line["parts"])
    assert predicted == pytest.approx(1e3 * tap.plan_of(model).cost.seconds)
    (epoch,) = [line for line in lines(tmp_path) if line.get("span") == "epoch"]
    assert data["measured_ms"] < epoch["step_ms"]
    moved = parallel_model(model).executables["train"].partitioned.collectives()
    assert epoch["moved_mb"] == pytest.approx(sum(size for *_, size in moved) / 1e6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"planner": None, "cluster": None}, nightly(None)])
def test_without_a_prediction_steps_are_measured(options, tmp_path, capsys):
    model = small() if options is None else parallel(**options, verbose=1)
    x, y = rows(8 * 24, WIDTH)
    history = model.fit(x, y, batch_size=8, verbose=0, callbacks=[tap.Monitor(tmp_path)]).history
    assert history["step_ms"][0] > 0 and "predicted_over_measured" not in history
    assert "mfu" not in history and ("samples_per_s" in history) == (options is not None)
    (line,) = [line for line in lines(tmp_path) if "verdict" in line]
    assert line["verdict"].startswith("measured ") and line["verdict"] in capsys.readouterr().out


@pytest.mark.slow
def test_several_steps_in_one_execution_count_one_by_one(tmp_path):
    model = parallel()
    model.steps_per_execution = 3
    x, y = rows(8 * 13, WIDTH)
    callback = tap.Monitor(tmp_path, every=6)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
    reports = [(line["step"], line["timed_steps"]) for line in lines(tmp_path)]
    assert reports == [(6, 0), (12, 6), (13, 7)] or reports == [(12, 6), (13, 7)]
    # Another fit goes on where this one ended, in the same files.
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
    assert lines(tmp_path)[-1]["step"] == 26 and lines(tmp_path)[-1]["timed_steps"] == 13


@pytest.mark.slow
def test_evaluation_does_not_count(tmp_path):
    class Slow(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            time.sleep(0.5)

    model, (x, y) = parallel(), rows(32, WIDTH)
    model.fit(
        *(x, y),
        **{"batch_size": 8, "epochs": 2, "verbose": 0, "validation_data": (x, y)},
        callbacks=[Slow(), tap.Monitor(tmp_path, every=2)],
    )
    assert all(line["step_ms"] < 400 for line in lines(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [tap.Pipeline(stages=2, microbatches=2), nightly(4)])
def test_pipelines_are_watched(pipeline, tmp_path):
    asked = pipeline if isinstance(pipeline, tap.Pipeline) else tap.Pipeline(microbatches=pipeline)
    model = parallel(pipeline=asked)
    x, y = rows(8 * 24, WIDTH)
    history = model.fit(x, y, batch_size=8, verbose=0, callbacks=[tap.Monitor(tmp_path)]).history
    assert history["samples_per_s"][0] > 0 and history["mfu"][0] > 0
    (line,) = [line for line in lines(tmp_path) if "verdict" in line]
    stages = ", waiting for other stages" if asked.order.num_stages > 1 else ""
    assert line["parts"][-1]["name"] == f"all but collectives (compute{stages})"
    if stages:
        sent = tap.plan_of(model).stages.cost.stages
        assert history["moved_mb"][0] == pytest.approx(sum(s.sent_bytes for s in sent) / 2 / 1e6)


# --- planning anew ------------------------------------------------------------------------------


class Losses(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(logs["loss"])


def slow_devices(ranks: int = 2) -> tap.Cluster:
    """As if computing were all that takes time: the batch is split."""
    slow = tap.Device({"float32": 1e7}, 1e9, 1e11)
    return tap.Cluster.regular("slow", slow, [tap.Level(ranks, 1e10, 1e-6)])


SWAPS = {
    "one piece": (small, WIDTH, slow_devices(2), None),
    "two stages": (deep, 256, machines(1e10, 4), tap.Pipeline(stages=2, microbatches=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "build, width, cluster, pipeline",
    [SWAPS["one piece"], nightly(*SWAPS["two stages"])],
    ids=SWAPS.keys(),
)
def test_training_goes_on_by_a_new_plan_with_the_same_numbers(
    build, width, cluster, pipeline, tmp_path
):
    """Weights, slots, masks, metrics, and batches, of which the last one is smaller."""
    x, y = rows(91, width)

    def trained(*callbacks: Any, on_mesh: bool) -> tuple[keras.Model, list[float], dict]:
        keras.utils.set_random_seed(5)
        asked = {"planner": "tap", "cluster": cluster, "pipeline": pipeline, "verbose": 0}
        mesh = tap.auto_parallel([cluster.size], **asked) if on_mesh else contextlib.nullcontext()
        with mesh:
            model = build()
        losses = Losses()
        history = model.fit(
            *(x, y),
            **{"batch_size": 4, "epochs": 2, "verbose": 0, "validation_data": (x[:9], y[:9])},
            callbacks=[losses, *callbacks],
        )
        return model, losses.values, history.history

    plain, wanted, history = trained(on_mesh=False)
    with slow_all_reduces(InProcessProgram, 0.02):
        model, losses, found = trained(tap.Monitor(tmp_path, replan=0.1), on_mesh=True)
    replanned = [line["replan"] for line in lines(tmp_path) if "replan" in line]
    assert replanned[0]["taken"] and replanned[0]["after_s"] < 0.9 * replanned[0]["before_s"]
    plan = tap.plan_of(model)
    assert not plan.batch_axes or plan.mesh.shape[plan.mesh.axis(plan.batch_axes[0])] == 1
    # For the machines as they were measured; whether their work differs hangs on what else runs.
    assert plan.cluster.measured and not cluster.measured
    np.testing.assert_allclose(losses, wanted, rtol=2e-4)
    for name, values in history.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=1e-6, err_msg=name)
    for mine, its in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=2e-3, atol=2e-4)
    pairs = zip(model.optimizer.variables, plain.optimizer.variables, strict=True)
    for mine, its in pairs:
        np.testing.assert_allclose(mine.numpy(), its.numpy(), rtol=5e-3, atol=2e-4)
    assert int(model.optimizer.iterations) == 46
    # What ran by the old plan is let go of.
    executables = parallel_model(model).trained_by.executables
    assert {version for _, _, version in executables} == {parallel_model(model).program.version}


@pytest.mark.nightly
def test_a_plan_is_kept_where_others_do_not_gain_enough(tmp_path):
    model = parallel(cluster=slow_devices())
    fit = {"batch_size": 8, "epochs": 3, "verbose": 0}
    model.fit(*rows(8 * 23, WIDTH), **fit, callbacks=[tap.Monitor(tmp_path, replan=0.95)])
    found = [line["replan"]["taken"] for line in lines(tmp_path) if "replan" in line]
    assert found and not any(found)
    assert parallel_model(model).session.cluster == slow_devices()
    assert tap.plan_of(model).batch_axes


@pytest.mark.parametrize(
    "model, error",
    [
        (small, "model .* runs on one device: build it inside"),
        (lambda: parallel(planner=None), "planner=None, and no plan is searched"),
    ],
)
def test_what_has_no_plan_cannot_be_planned_anew(model, error, tmp_path):
    with pytest.raises(TfparError, match=error):
        model().fit(*rows(8, WIDTH), verbose=0, callbacks=[tap.Monitor(tmp_path, replan=0.1)])


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"every": 0}, "every is 0; it must be a whole number, 1 or more"),
        ({"every": 2.5}, "every is 2.5"),
        ({"folder": 3}, "folder is 3; it must be a path"),
        ({"compare": "yes"}, "compare is 'yes'; it must be True or False"),
        ({"replan": 1}, "replan is 1; it must be a part of a step, from 0 to below 1, or None"),
        ({"replan": -0.1}, "replan is -0.1"),
        ({"replan": math.nan}, "replan is nan"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error):
    with pytest.raises(ArgumentError, match=error):
        tap.Monitor(**arguments)


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_is_an_error_before_anything_trains(tmp_path):
    (tmp_path / "file").write_text("")
    model = small()
    with pytest.raises(TfparError, match="cannot write to .*Name another folder"):
        model.fit(*rows(8, WIDTH), verbose=0, callbacks=[tap.Monitor(tmp_path / "file" / "x")])
    model.fit(*rows(8, WIDTH), verbose=0, callbacks=[tap.Monitor(None)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.slow
def test_the_prediction_is_that_of_the_batch_that_was_planned_for():
    """Another batch size, and the same one after compiling again, which makes other programs."""
    model, (x, y) = parallel(), rows(64, WIDTH)
    monitor = tap.Monitor(None)
    fit = {"epochs": 2, "verbose": 0, "callbacks": [monitor]}

    def told(**arguments: Any) -> bool:
        history = model.fit(x, y, **fit, **arguments).history
        return not math.isnan(history["predicted_over_measured"][-1])

    assert told(batch_size=8)
    assert not told(batch_size=16)
    model.compile(model.optimizer, model.loss, metrics=["accuracy"])
    assert told(batch_size=8)


def test_a_model_that_runs_eagerly_is_measured_on_its_one_device(tmp_path):
    model = parallel()
    model.run_eagerly = True
    callback = tap.Monitor(tmp_path, every=2)
    history = model.fit(*rows(32, WIDTH), batch_size=8, verbose=0, callbacks=[callback]).history
    assert history["step_ms"][0] > 0 and "mfu" not in history
