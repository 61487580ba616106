"""`tap.Checkpoint` while `fit` goes on: equal to the state at its step, and waited for."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar as tap
from tests import preloaded
from tests.jobs.launch.programs import variables
from tests.time_limits import time_limit
from tfpar.spec import TfparError
from tfpar.tf.checkpoint import Reader, checkpoints, files, latest, writer
from tfpar.tf.keras import saving

STEPS, BATCH = 6, 4


def small_model() -> keras.Model:
    """Updated densely, and row by row."""
    with tap.auto_parallel(tap.Mesh.of({"model": 2}), planner=None):
        ids = keras.Input((2,), dtype="int32")
        x = keras.layers.Flatten()(keras.layers.Embedding(8, 4, name="rows")(ids))
        model = keras.Model(ids, keras.layers.Dense(6, name="a")(x), name="small")
        model.compile(keras.optimizers.Adam(0.1, name="adam"), "mse", jit_compile=False)
    return model


def train(model: keras.Model, *callbacks: keras.callbacks.Callback, epochs: int = 1) -> None:
    x = np.arange(STEPS * BATCH * 2).reshape(-1, 2) % 8
    y = np.ones((len(x), 6), "float32")
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=list(callbacks))


def stored(model: keras.Model) -> dict[str, np.ndarray]:
    found = [*model.variables, *model.optimizer.variables]
    return {v.path: keras.ops.convert_to_numpy(v) for v in found}


def in_checkpoint(path: str) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(f"{path}/tensors")
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


class Watch(keras.callbacks.Callback):
    """What is stored after each step; calls `act` with the number of each that begins."""

    def __init__(self, act=lambda step: None) -> None:
        super().__init__()
        self.after: dict[int, dict[str, np.ndarray]] = {}
        self._act = act

    def on_train_batch_begin(self, batch, logs=None):
        self._act(batch + 1)

    def on_train_batch_end(self, batch, logs=None):
        self.after[batch + 1] = stored(self.model)


@pytest.fixture
def slow(monkeypatch):
    """Writing takes longer than training."""
    write = writer.write_part

    def write_slowly(*arguments):
        time.sleep(0.1)
        write(*arguments)

    monkeypatch.setattr(writer, "write_part", write_slowly)


def test_it_is_the_state_of_its_step_though_training_went_on(tmp_path, gate):
    def open_late(step: int) -> None:
        if step == 4:
            assert latest(str(tmp_path)) is None
            gate.set()

    watch, model = Watch(open_late), small_model()
    train(model, watch, tap.Checkpoint(tmp_path, every=2, keep=9))
    paths = checkpoints(str(tmp_path))
    assert [Reader(path).step for path in paths] == [2, 4, 6]
    for path, step in zip(paths, (2, 4, 6), strict=True):
        found, wanted = in_checkpoint(path), watch.after[step]
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name} at step {step}")
    assert not np.array_equal(watch.after[2]["a/kernel"], watch.after[3]["a/kernel"])


def test_the_next_one_waits_for_the_one_before(tmp_path, slow):
    checkpoint = tap.Checkpoint(tmp_path, every=1, keep=9)

    def look(step: int) -> None:
        assert len(checkpoints(str(tmp_path))) >= step - 2  # at most one is being written

    train(small_model(), Watch(look), checkpoint)
    assert [Reader(path).step for path in checkpoints(str(tmp_path))] == [*range(1, STEPS + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_the_end_of_fit_waits(tmp_path, slow, background):
    model = small_model()
    checkpoint = tap.Checkpoint(tmp_path, background=background)
    train(model, checkpoint)
    assert Reader(latest(str(tmp_path))).step == STEPS
    train(model, checkpoint, epochs=2)
    assert Reader(latest(str(tmp_path))).info["epoch"] == 2


def test_an_error_in_fit_waits_and_the_next_fit_goes_on_from_there(tmp_path, slow):
    def fail(step: int) -> None:
        if step == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(small_model(), tap.Checkpoint(tmp_path, every=3), Watch(fail))
    assert Reader(latest(str(tmp_path))).step == 3
    again = Watch()
    train(small_model(), tap.Checkpoint(tmp_path, every=3), again)
    assert sorted(again.after) == [*range(1, STEPS + 1)]  # three of which are passed over
    assert Reader(latest(str(tmp_path))).step == STEPS


def test_who_restores_or_saves_waits(tmp_path, slow):
    model = small_model()
    train(model)
    state = saving_state(model)
    saving.save_behind(state, str(tmp_path), saving.Position(step=7))
    assert tap.restore_checkpoint(model, tmp_path).step == 7
    saving.save_behind(state, str(tmp_path), saving.Position(step=8))
    tap.save_checkpoint(model, tmp_path, keep=9)
    assert {Reader(path).step for path in checkpoints(str(tmp_path))} == {STEPS, 7, 8}
    assert saving.finish() == ""


def saving_state(model: keras.Model):
    from tfpar.tf.keras.adapter import state_of

    return state_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("every, step", [(2, 4), ("epoch", STEPS)], ids=["next", "end"])
@pytest.mark.parametrize("where", ["_write_bundle", "_describe"])
def test_what_could_not_be_written_is_raised_at_the_next_one_or_the_end(
    tmp_path, monkeypatch, where, every, step
):
    write, kept = getattr(files, where), tmp_path / "run" / "kept"
    model, watch = small_model(), Watch()
    train(model)
    kept.parent.mkdir()
    tap.save_checkpoint(model, kept.parent)
    before = os.listdir(kept.parent)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, where, full)
    checkpoint = tap.Checkpoint(kept.parent, every, keep=9)
    with pytest.raises(TfparError, match=rf"{kept.parent}.*No space left on device"):
        train(model, watch, checkpoint)
    assert max(watch.after) == step
    assert os.listdir(kept.parent) == before
    monkeypatch.setattr(files, where, write)
    train(model, checkpoint)  # the disk has room again
    assert len(checkpoints(str(kept.parent))) > 0


_ENDS = """
import sys, time
from tests.tf.checkpoint.test_training_goes_on import small_model, saving_state, train
from tfpar.tf.checkpoint import writer
from tfpar.tf.keras import saving

write = writer.write_part
def write_slowly(*arguments):
    time.sleep(0.2)
    write(*arguments)

writer.write_part = write_slowly
model = small_model()
train(model)
saving.save_behind(saving_state(model), sys.argv[1], saving.Position(step=7))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("code", [0, 3])
def test_the_end_of_the_process_waits(tmp_path, code):
    command = preloaded.python("-c", _ENDS, tmp_path, code)
    done = subprocess.run(command, env=variables(), timeout=time_limit(240))
    assert done.returncode == code
    assert Reader(latest(str(tmp_path))).step == 7
    assert Path(tmp_path, "step-00000007").is_dir()
