"""Timelines of real training, all ranks in one process."""

from __future__ import annotations

import logging
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tests.observability.report.pages import data_of
from tests.observability.timeline.files import TimelineFile
from tfpar.observability.timeline.nodes import Nodes
from tfpar.observability.timeline.recorded import StepWindow, steps_of_ranks
from tfpar.observability.timeline.recorder import Recordable, this_recorder
from tfpar.observability.timeline.request import TimelineRequest
from tfpar.tf.interop import OpEvent, Profiler
from tfpar.tf.keras import state_of

BATCH, BATCHES = 8, 6
X = np.random.default_rng(1).normal(size=(BATCH * BATCHES, 16)).astype("float32")
Y = np.random.default_rng(2).integers(0, 4, BATCH * BATCHES)


def model_on(mesh: tap.Mesh, *constraints, jit_compile=False, **options) -> keras.Model:
    with tap.auto_parallel(mesh, planner=None, constraints=constraints, **options):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((16,)),
                keras.layers.Dense(32, "relu", name="up"),
                keras.layers.Dropout(0.1, name="drop"),
                keras.layers.Dense(16, name="down"),
                keras.layers.Dense(4, name="head"),
            ],
            name="net",
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=jit_compile)
    return model


@pytest.fixture(scope="module")
def split() -> keras.Model:
    """A model whose batch is split over two ranks, and a layer over two others."""
    mesh = tap.Mesh(("data", "model"), (2, 2))
    constraints = tap.batch("data"), tap.shard("net/up/kernel", 1, "model")
    return model_on(mesh, *constraints, cluster="dgx-a100")


def fitted(model: keras.Model, path, steps=(3, 5), **options) -> TimelineFile:
    callbacks = [tap.Timeline(path, steps=steps)]
    model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=callbacks, **options)
    return TimelineFile(path)


def test_a_timeline_is_of_the_chosen_steps_alone(split, tmp_path):
    file = fitted(split, tmp_path / "t.json", (5, 8), epochs=2)
    assert os.listdir(tmp_path) == ["t.json"]
    assert file.processes == {rank: f"rank {rank}" for rank in range(4)}
    steps = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in file.of("steps", 0)}
    assert [*steps] == ["step 5", "step 6", "step 7", "step 8"]  # 6 are the first epoch
    for thread in ("compute", "communication"):
        for event in file.of(thread):
            begin, end = steps[f"step {event['args']['step']}"]
            assert begin - 1 <= event["ts"] <= end + 1
            assert event["ts"] + event["dur"] <= end + 1
        assert {e["args"]["step"] for e in file.of(thread, 0)} == {5, 6, 7, 8}


def test_slices_are_called_after_layers(split, tmp_path):
    file = fitted(split, tmp_path / "t.json")
    names = {e["name"] for e in file.of("compute", 0)}
    assert {"net/up", "net/drop", "net/down", "net/head"} <= names
    assert names <= {"net/up", "net/drop", "net/down", "net/head"} | {
        *("net", "step", "adam", "compile_loss", "feed"),
    }
    forward = file.of("compute", 0, step=3, op="_FusedMatMul") or [
        e for e in file.of("compute", 0, step=3) if "MatMul" in e["args"]["op"]
    ]
    assert {e["name"] for e in forward} >= {"net/up", "net/down", "net/head"}
    phases = {e["cat"] for e in file.of("compute", 0) if e["name"] == "net/up"}
    assert phases == {"forward", "backward", "update"}


def test_collectives_move_what_the_plan_says(split, tmp_path):
    file = fitted(split, tmp_path / "t.json")
    executable = state_of(split).executables["train"]
    planned: dict[tuple[str, tuple[str, ...]], int] = {}
    for kind, axes, num_bytes in executable.partitioned.collectives():
        planned[kind, axes] = planned.get((kind, axes), 0) + num_bytes
    for step in (3, 4, 5):
        seen: dict[tuple[str, tuple[str, ...]], int] = {}
        for event in file.collectives(0, step=step):
            key = event["name"].rpartition(" ")[2], tuple(event["args"]["axes"])
            seen[key] = seen.get(key, 0) + event["args"]["bytes"]
        assert seen == planned
    assert all(e["args"]["predicted"] > 0 for e in file.collectives(0))
    assert {(0, 1), (0, 2)} <= {tuple(e["args"]["group"]) for e in file.collectives(0)}


def test_microbatches_are_tasks(tmp_path):
    mesh = tap.Mesh(("data",), (2,))
    model = model_on(mesh, tap.batch("data"), pipeline=tap.Pipeline(microbatches=2))
    file = fitted(model, tmp_path / "t.json", (3, 3))
    tasks = file.of("tasks", 1)
    assert len(tasks) == 2
    ((reduced,),) = ([e for e in file.collectives(1)],)
    assert reduced["ts"] >= tasks[1]["ts"] + tasks[1]["dur"] - 1
    assert set(reduced["args"]["layers"]) >= {"net/up", "net/down", "net/head"}


@pytest.mark.slow
def test_what_xla_compiles_is_of_its_layers(tmp_path):
    mesh = tap.Mesh(("model",), (2,))
    model = model_on(mesh, tap.shard("net/up/kernel", 1, "model"), jit_compile=True)
    file = fitted(model, tmp_path / "t.json")
    compiled = [e for e in file.of("compute") if e["args"]["op"].endswith("PartitionedCall")]
    assert {e["name"] for e in compiled} & {"net/up", "net/down", "net/head"}
    assert file.collectives(0, step=4) and file.collectives(1, step=4)


def test_steps_per_execution_are_steps(tmp_path):
    model = model_on(tap.Mesh(("data",), (2,)), tap.batch("data"))
    model.steps_per_execution = 3
    file = fitted(model, tmp_path / "t.json", (2, 4))
    assert [e["name"] for e in file.of("steps", 1)] == ["step 2", "step 3", "step 4"]


def test_who_is_late_to_a_sum_is_named_where_ranks_share_a_process(split):
    """The program is real; what the profiler saw of it is made up."""
    state = state_of(split)
    executable = state.executables["train"]
    nodes = Nodes(executable.compiled, executable.captured.gradient_tensors, None, None)
    program = executable.local
    reduce = next(op for op in program.graph.ops if op.type == "AllReduce")
    made = reduce.inputs[0].op
    group = program.mesh.groups(reduce.attrs["axes"])[0]
    ends = {rank: 100 * (i + 1) for i, rank in enumerate(group)}
    seen = [OpEvent(f"r{rank}/{made.name}", "MatMul", 10, end) for rank, end in ends.items()]
    seen.append(OpEvent(f"{reduce.name}/g0/0/0", "AddV2", 500, 600))
    seen.append(OpEvent(f"{reduce.name}/g0/0/0/_7", "_Send", 600, 700))
    found = steps_of_ranks(StepWindow(1, 0, 1000), seen, nodes, range(4), ahead=5000)
    for rank in group:
        (met,) = found[rank].met
        assert (met.arrived, met.end) == (5000 + ends[rank], 5600)
        assert met.kind.group == group
    assert not any(found[rank].met for rank in range(4) if rank not in group)


def test_steps_that_are_not_reached_are_told_of(split, tmp_path, caplog):
    for steps, only in (((100, 101), ""), ((5, 9), "only 5, 6 ran")):
        path, callback = tmp_path / "t.json", tap.Timeline(tmp_path / "t.json", steps=steps)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tfpar"):
            split.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[callback])
        (told,) = caplog.messages
        assert "is not written: training ended after 6 steps" in told
        assert f"{steps[0]} to {steps[1]}" in told and only in told
        assert not path.exists()
    fitted(split, tmp_path / "t.json")  # the next one is as any other


def test_a_busy_profiler_is_told_of_and_training_goes_on(split, tmp_path, caplog):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        with caplog.at_level(logging.WARNING, "tfpar"):
            callbacks = [tap.Timeline(tmp_path / "t.json", steps=(2, 3))]
            split.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    finally:
        tf.profiler.experimental.stop(save=False)
    assert "TensorFlow's profiler cannot start" in caplog.text
    assert not (tmp_path / "t.json").exists()


def test_the_page_of_a_plan_has_a_measured_step_beside_the_predicted_one(split, tmp_path):
    file = fitted(split, tmp_path / "t.json", (4, 6))
    page = tap.plan_of(split).to_html(timeline=tmp_path / "t.json")
    step = data_of(page)["measured"]
    assert 4 <= step["number"] <= 6 and step["ranks"] == 4
    drawn = [s for lane in step["lanes"] for s in lane["slices"]]
    own = [e for e in file.slices if e["args"].get("step") == step["number"]]
    assert len(drawn) == len(own)
    assert {"net/up", "net/head"} <= {s["name"] for s in drawn}
    assert all(-1e-9 < s["start"] <= s["end"] < step["seconds"] + 1e-9 for s in drawn)


def test_one_timeline_at_a_time(split, tmp_path):
    callbacks = [tap.Timeline(tmp_path / f"{i}.json", steps=(2, 3)) for i in range(2)]
    with pytest.raises(tap.TfparError, match=r"is to be written to '.*0.json' already"):
        split.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    fitted(split, tmp_path / "0.json")  # what has failed is over


class Fails(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3:
            raise RuntimeError("on purpose")


def test_training_that_fails_leaves_no_profiler_behind(split, tmp_path):
    callbacks = [tap.Timeline(tmp_path / "t.json", steps=(2, 5)), Fails()]
    with pytest.raises(RuntimeError, match="on purpose"):
        split.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    assert not os.listdir(tmp_path)
    fitted(split, tmp_path / "t.json")


def test_a_step_that_fails_ends_the_recording(tmp_path):
    recorder = this_recorder()
    recorder.ask(TimelineRequest.of(tmp_path / "t.json", (1, 2)))
    step = Recordable(None, (), None, 1, None)
    with pytest.raises(RuntimeError, match="on purpose"), recorder.step(step):
        raise RuntimeError("on purpose")
    profiler = Profiler()
    profiler.start()  # which it could not, did the other one still run
    profiler.drop()
    with recorder.step(step):
        pass
    assert not os.listdir(tmp_path)


def test_evaluation_is_no_step(split, tmp_path):
    validated = {"validation_data": (X, Y), "epochs": 2}
    file = fitted(split, tmp_path / "t.json", (6, 7), **validated)
    first, second = file.of("steps", 0)
    between = [e for e in file.of("compute") if first["ts"] + first["dur"] < e["ts"] < second["ts"]]
    assert (first["name"], second["name"], between) == ("step 6", "step 7", [])


def test_functions_have_steps_too(tmp_path):
    with tap.auto_parallel(tap.Mesh(("data",), (2,)), planner=None, constraints=tap.batch("data")):
        weight = tf.Variable(tf.ones([16, 4]), name="weight")

        @tap.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weight) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        this_recorder().ask(TimelineRequest.of(tmp_path / "t.json", (2, 3)))
        for _ in range(4):
            step(X[:BATCH])
    file = TimelineFile(tmp_path / "t.json")
    assert [e["name"] for e in file.of("steps", 1)] == ["step 2", "step 3"]
    assert file.collectives(1)


def test_a_model_that_is_not_parallel_has_none(tmp_path):
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    with pytest.raises(tap.TfparError, match="is not parallel"):
        model.fit(X, X[:, :4], verbose=0, callbacks=[tap.Timeline(tmp_path / "t.json")])
