"""One run at a time holds a folder of checkpoints, and no run that has ended."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.time_limits import wait_until
from tfpar.spec import TfparError
from tfpar.tf.checkpoint import FolderLock, lock


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Runs that nobody sees are waited for half a second."""
    monkeypatch.setattr(lock, "RENEWAL_S", 0.05)
    monkeypatch.setattr(lock, "PATIENCE_S", 0.5)
    monkeypatch.setattr(lock, "_SETTLED_S", 0.0)


def hold(folder, **fields) -> lock.Owner:
    """Let another run hold the folder: this process, but for some fields."""
    owner = dataclasses.replace(lock.Owner.of_this_process(), **fields)
    (folder / lock.LOCK).write_text(json.dumps(dataclasses.asdict(owner)))
    return owner


@pytest.fixture
def living():
    """The id of another process of this machine that lives as long as the test."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()


def start_of(pid: int) -> str:
    started = lock._start_of(pid)
    assert started is not None
    return started


def test_a_folder_is_held_until_it_is_released(tmp_path):
    held = FolderLock(str(tmp_path / "run"))
    assert lock._owner_in(str(tmp_path / "run" / lock.LOCK)) == held._owner
    held.check()
    held.release()
    assert os.listdir(tmp_path / "run") == []
    held.release()


def test_a_run_that_lives_keeps_it_and_is_named(tmp_path, living):
    owner = hold(tmp_path, pid=living, started=start_of(living))
    with pytest.raises(TfparError, match=f"Another run .*{tmp_path}: process {living} on host "):
        FolderLock(str(tmp_path))
    assert lock._owner_in(str(tmp_path / lock.LOCK)) == owner


@pytest.mark.parametrize("gone", ["ended", "number given again"])
def test_a_process_that_has_gone_holds_nothing(tmp_path, caplog, gone, living):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    pid, started = (dead.pid, "1") if gone == "ended" else (living, "1")
    hold(tmp_path, pid=pid, started=started)
    held = FolderLock(str(tmp_path))
    assert f"was held by process {pid} on host" in caplog.text
    assert "which has ended: this run takes it over" in caplog.text
    held.check()
    held.release()


def test_a_zombie_holds_nothing(tmp_path):
    """As under a launcher that has not looked after a killed rank yet."""
    dead = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    started = start_of(dead.pid)
    dead.stdout.read()
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    hold(tmp_path, pid=dead.pid, started=started)
    FolderLock(str(tmp_path)).release()
    dead.wait()


def test_a_run_elsewhere_holds_it_while_it_renews_its_lock(tmp_path, monkeypatch):
    renewed = []

    def sleep_and_renew(seconds):
        renewed.append(seconds)
        os.utime(tmp_path / lock.LOCK, ns=(0, len(renewed)))

    hold(tmp_path, host="node7", pid=1)
    monkeypatch.setattr(lock.time, "sleep", sleep_and_renew)
    with pytest.raises(TfparError, match="Another run .* process 1 on host node7, since 20"):
        FolderLock(str(tmp_path))
    assert len(renewed) == 1


@pytest.mark.parametrize("fields", [{"host": "node7"}, {"system": "another container"}, None])
def test_a_run_elsewhere_that_gives_no_sign_of_life_holds_nothing(tmp_path, caplog, fields):
    if fields is None:  # killed while it wrote
        (tmp_path / lock.LOCK).write_text("{")
    else:
        hold(tmp_path, pid=1, **fields)
    FolderLock(str(tmp_path)).release()
    assert "gave no sign of life for 0 s: this run takes it over" in caplog.text


def test_a_lock_that_is_released_while_it_is_watched_is_taken(tmp_path, monkeypatch, caplog):
    hold(tmp_path, host="node7")
    monkeypatch.setattr(lock.time, "sleep", lambda _: (tmp_path / lock.LOCK).unlink())
    FolderLock(str(tmp_path)).release()
    assert "takes it over" not in caplog.text


def test_a_holder_renews_its_lock_and_puts_it_back(tmp_path, caplog):
    held, path = FolderLock(str(tmp_path)), tmp_path / lock.LOCK
    os.utime(path, ns=(0, 0))
    assert wait_until(lambda: path.stat().st_mtime_ns, 10)
    path.unlink()
    held.check()
    assert path.exists() and "is back" in caplog.text
    held.release()


def test_who_has_lost_its_lock_writes_nothing_and_leaves_the_other_alone(tmp_path):
    held = FolderLock(str(tmp_path))
    owner = hold(tmp_path, host="node7")
    with pytest.raises(TfparError, match="taken over by process .* on host node7"):
        held.check()
    held.release()
    assert lock._owner_in(str(tmp_path / lock.LOCK)) == owner


class Stop(keras.callbacks.Callback):
    def __init__(self, act) -> None:
        super().__init__()
        self._act = act

    def on_train_batch_begin(self, batch, logs=None):
        self._act()


def test_fit_holds_its_folder_and_releases_it_where_it_fails(tmp_path, living):
    with tap.auto_parallel([2], planner=None, verbose=0):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")

    def fit(*callbacks):
        data = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")
        model.fit(*data, verbose=0, callbacks=[tap.Checkpoint(tmp_path), *callbacks])

    def fail():
        assert (tmp_path / lock.LOCK).exists()
        raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(Stop(fail))
    assert os.listdir(tmp_path) == []
    other = {"pid": living, "started": start_of(living)}
    hold(tmp_path, **other)
    with pytest.raises(TfparError, match=f"process {living} on host"):
        fit()
    (tmp_path / lock.LOCK).unlink()
    with pytest.raises(TfparError, match="taken over"):  # and no checkpoint is written
        fit(Stop(lambda: hold(tmp_path, **other)))
    assert os.listdir(tmp_path) == [lock.LOCK]
    (tmp_path / lock.LOCK).unlink()
    fit()
    assert os.listdir(tmp_path) == ["step-00000001"]
