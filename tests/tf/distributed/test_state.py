"""Initial values, files and checkpoints where ranks are processes: ranks run `state_ranks`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tests import preloaded
from tests.jobs.launch.programs import variables
from tests.tf.distributed import jobs
from tests.tf.distributed import state_ranks as ranks
from tests.tf.distributed.jobs import Checked
from tests.time_limits import time_limit
from tfpar.spec import TfparError
from tfpar.tf.checkpoint import files
from tfpar.tf.keras.files import complete

pytestmark = pytest.mark.xdist_group("processes")

_SECONDS = 240  # for one job


def state_ranks(job: str, size: int, folder: Path) -> Checked:
    ended = jobs.run(size, "tests.tf.distributed.state_ranks", job, folder, seconds=_SECONDS)
    return Checked(ended, folder / job)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What one device makes: values at the start, after the interruption, and at the end."""
    folder = tmp_path_factory.mktemp("state")
    ranks.forget_names()
    model = ranks.seeded()
    start = {w.path: np.array(w) for w in model.weights}
    interrupt = ranks.Interrupt(ranks.INTERRUPTED)
    with pytest.raises(InterruptedError):
        model.fit(ranks.dataset(), epochs=ranks.EPOCHS, verbose=0, callbacks=[interrupt])
    saved = ranks.values(model)
    model.save_weights(folder / "plain.weights.h5")
    model.save(folder / "plain.keras")
    ranks.forget_names()
    model = ranks.seeded()
    model.fit(ranks.dataset(), epochs=ranks.EPOCHS, verbose=0)
    kept = {"start": start, "saved": saved, "end": ranks.values(model)}
    arrays: dict[str, Any] = {
        f"{of}:{k}": v for of, found in kept.items() for k, v in found.items()
    }
    np.savez(folder / "plain.npz", **arrays)
    return folder


@pytest.fixture(scope="module")
def two(folder) -> Checked:
    return state_ranks("of_two", 2, folder)


@pytest.fixture(scope="module")
def four(folder, two) -> Checked:
    for mesh in ranks.MESHES:
        shutil.copytree(folder / "run", folder / f"run-{mesh}")
    return state_ranks("of_four", 4, folder)


@pytest.fixture
def checkpoint(folder, two) -> str:
    """The one that two ranks wrote while they trained."""
    two.assert_held("checkpoint")
    (path,) = (folder / "run").iterdir()
    return str(path)


# --- processes -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        "initial",
        "load-after",
        "load-before",
        "load-model",
        "checkpoint",
        "graph",
        "checkpoint-fails",
        "restore-refused",
        "checkpoint-behind",
        "checkpoint-behind-fails",
        "graph-replicated",
    ],
)
def test_on_two_ranks(two, check):
    two.assert_held(check)
    assert two.job.code == 0, two.job.output


def of_four_ranks(cases: Iterable[str], by_day: Sequence[str]) -> pytest.MarkDecorator:
    """What the job of four ranks does in each of these cases; in some at night only."""
    marks = {True: (), False: pytest.mark.nightly}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=marks[case in by_day]) for case in cases]
    )


@pytest.mark.slow
@of_four_ranks(ranks.LAYOUTS, ranks.LAYOUTS_BY_DAY)
@pytest.mark.parametrize("check", ["initial", "restore"])
def test_on_four_ranks(four, check, case):
    four.assert_held(f"{check}-{case}")


@pytest.mark.slow
@of_four_ranks(ranks.MESHES, ranks.MESHES_BY_DAY)
def test_a_run_of_two_ranks_goes_on_with_four(four, case):
    four.assert_held(f"go-on-{case}")
    assert four.job.code == 0, four.job.output


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("check", ["load-before", "load-model"])
def test_four_ranks_load_files(four, check):
    four.assert_held(check)


@pytest.mark.slow
def test_four_ranks_save_what_they_restored(folder, four, checkpoint):
    four.assert_held("save-again")
    again = folder / "again" / f"step-{ranks.INTERRUPTED:08d}"
    ranks.same(ranks.of_checkpoint(str(again)), ranks.of_checkpoint(checkpoint))


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_on_one_device(folder, checkpoint):
    """With TensorFlow's reader: tensors have the paths of Keras's variables."""
    reader = tf.train.load_checkpoint(f"{checkpoint}/tensors")
    ranks.forget_names()
    model = ranks.seeded()
    model.optimizer.build(model.trainable_variables)
    for variable in [*model.variables, *model.optimizer.variables]:
        variable.assign(reader.get_tensor(variable.path))
    position = json.loads(Path(checkpoint, "checkpoint.json").read_text())["info"]
    data = ranks.dataset()

    def epoch() -> list:
        batches = list(data)
        iter(data)  # `fit` makes one more at the end of an epoch, which takes a seed of the shuffle
        return batches

    done = [epoch() for _ in range(position["epoch"])]  # passed over
    assert [len(batches) for batches in done] == [position["batches"]]
    left = epoch()[position["batch"] :]
    for _ in range(position["epoch"] + 1, ranks.EPOCHS):
        left += epoch()
    for batch in left:
        model.train_on_batch(*batch)
    ranks.close(ranks.values(model), ranks.plain(folder, "end"))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(folder, checkpoint, tmp_path):
    with ranks.laid("2")():
        model = ranks.build()
    ranks.restores(folder, model)
    shutil.copytree(checkpoint, tmp_path / Path(checkpoint).name)
    ranks.goes_on(tmp_path, folder, ranks.laid("2"))


@pytest.mark.slow
def test_a_rank_killed_while_it_saves_leaves_the_old_file(tmp_path):
    ran = state_ranks("killed", 2, tmp_path)
    assert ran.job.code != 0 and "SIGKILL" in ran.job.output, ran.job.output
    custom = {"Fatal": ranks.Fatal}
    model = keras.models.load_model(tmp_path / "killed.keras", custom_objects=custom)
    predictions = model.predict(np.ones((4, 4), "float32"), verbose=0)
    np.testing.assert_allclose(predictions, np.load(tmp_path / "before.npy"), rtol=1e-6)


# --- one process ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
def test_one_process_loads_files_shard_by_shard(folder):
    model = ranks.starts_as_on_one_device(folder, ranks.laid("2"))
    ranks.loads_files(folder, model)
    ranks.loads_before_the_first_step(folder, ranks.laid("2x2"))
    ranks.loads_a_model(folder, ranks.laid("2"))


def small_model() -> keras.Model:
    with tap.auto_parallel(tap.Mesh.of({"model": 2}), planner=None):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="a")], name="small")
        model.compile(keras.optimizers.Adam(name="adam"), "mse", jit_compile=False)
    return model


def test_a_loop_of_ones_own_saves_and_restores(tmp_path):
    x, y = np.ones((4, 4), "float32"), np.zeros((4, 6), "float32")
    model = small_model()
    for _ in range(3):
        model.train_on_batch(x, y)
    path = tap.save_checkpoint(model, tmp_path)
    assert Path(path).name == "step-00000003"
    saved = ranks.values(model)
    other = small_model()
    assert tap.restore_checkpoint(other, tmp_path).step == 3
    ranks.same(ranks.values(other), saved)
    model.train_on_batch(x, y)
    tap.save_checkpoint(model, tmp_path, keep=5)
    assert tap.restore_checkpoint(other, path).step == 3
    ranks.same(ranks.values(other), saved)
    other.train_on_batch(x, y)
    ranks.same(ranks.values(other), ranks.values(model))


@pytest.mark.parametrize(
    "where, error",
    [
        ("_write_bundle", OSError(28, "No space left on device")),
        ("_describe", OSError(28, "No space left on device")),
        ("_merge", KeyboardInterrupt()),
    ],
)
def test_a_checkpoint_that_fails_leaves_nothing(tmp_path, monkeypatch, where, error):
    model = small_model()
    tap.save_checkpoint(model, tmp_path)
    before = os.listdir(tmp_path)

    def fail(*_):
        raise error

    monkeypatch.setattr(files, where, fail)
    with pytest.raises(KeyboardInterrupt if where == "_merge" else TfparError):
        tap.save_checkpoint(model, tmp_path)
    assert os.listdir(tmp_path) == before


def test_what_cannot_be_saved_or_restored_is_said(tmp_path):
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6)])
    with pytest.raises(TfparError, match="inside tap.auto_parallel"):
        tap.save_checkpoint(plain, tmp_path)
    with pytest.raises(TfparError, match="not a complete checkpoint"):
        tap.restore_checkpoint(small_model(), tmp_path)
    with tap.auto_parallel(tap.Mesh.of({"model": 2})):
        unbuilt = keras.Sequential([keras.layers.Dense(6)], name="unbuilt")
    with pytest.raises(TfparError, match="'unbuilt' is not built.*call it on a batch"):
        tap.save_checkpoint(unbuilt, tmp_path)


def test_a_file_that_is_not_complete_takes_no_name(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("old")
    with pytest.raises(InterruptedError), complete(str(path)) as temporary:
        Path(temporary).write_text("half")
        raise InterruptedError
    assert [p.name for p in tmp_path.iterdir()] == ["model.keras"]
    assert path.read_text() == "old"
    with complete(str(path)) as temporary:
        Path(temporary).write_text("new")
    assert path.read_text() == "new"


_KILLED = """
import os, pathlib, signal, sys
from tfpar.tf.keras.files import complete
with complete(sys.argv[1]) as temporary:
    pathlib.Path(temporary).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("old")
    command = preloaded.python("-c", _KILLED, path)
    done = subprocess.run(command, env=variables(), timeout=time_limit(_SECONDS))
    assert done.returncode < 0
    assert path.read_text() == "old"


def test_a_plain_call_of_auto_parallel_lasts():
    scope = tap.auto_parallel([2]).session.entered  # nothing keeps the call's own result
    assert scope is not None
    try:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6)])
    finally:
        scope.__exit__(None, None, None)
    model.compile("sgd", "mse", jit_compile=False)
    model.train_on_batch(np.ones((4, 4), "float32"), np.zeros((4, 6), "float32"))
    assert tap.plan_of(model).mesh.size == 2
