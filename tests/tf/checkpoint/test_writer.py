"""A checkpoint written by a thread: of the moment it was begun, complete or not there."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest
import tensorflow as tf

from tests.time_limits import time_limit
from tfpar.spec import TfparError
from tfpar.tf.checkpoint import BackgroundWriter, Box, Draft, Reader, TensorWrite, latest, writer
from tfpar.tf.checkpoint import temporary_folder as temporary

ROWS, COLUMNS = 6, 4
_WAIT_S = time_limit(60)


def variable(value: float = 1.0) -> tf.Variable:
    return tf.Variable(tf.fill([ROWS, COLUMNS], value))


def begun(folder, *halves: tf.Variable, of: int = 2, first: int = 0, step: int = 1) -> Draft:
    """The parts of ranks from `first` on, of a tensor whose rows lie on `of` ranks."""
    rows = ROWS // of
    parts = {}
    for rank, half in enumerate(halves, first):
        box = Box((rank * rows, 0), (rows, COLUMNS), (0, 0))
        parts[rank] = [
            TensorWrite("v", (ROWS, COLUMNS), tf.float32, [box], lambda h=half: h[:rows])
        ]
    return Draft(temporary(str(folder), step, "test"), parts, of, {"step": step}, keep=2)


def value(path: str) -> np.ndarray:
    return Reader(path).read_whole("v").numpy()


@tf.function(jit_compile=True)
def compiled(v: tf.Variable) -> None:
    v.assign(2.0 * v)


UPDATES = {
    "assign": lambda v: v.assign(tf.zeros_like(v)),
    "assign_add": lambda v: v.assign_add(tf.ones_like(v)),
    "rows": lambda v: v.scatter_sub(tf.IndexedSlices(tf.ones([1, COLUMNS]), [0])),
    "slice": lambda v: v[1:3].assign(tf.zeros([2, COLUMNS])),
    "adam": lambda v: tf.raw_ops.ResourceApplyAdam(
        var=v.handle,
        m=variable(0.0).handle,
        v=variable(0.0).handle,
        beta1_power=0.9,
        beta2_power=0.9,
        lr=0.1,
        beta1=0.9,
        beta2=0.9,
        epsilon=0.1,
        grad=tf.ones([ROWS, COLUMNS]),
    ),
    "compiled": compiled,
}


@pytest.mark.parametrize("kind", UPDATES)
def test_values_are_those_of_the_moment_it_was_begun(tmp_path, gate, kind):
    v = variable()
    whole = TensorWrite("v", (ROWS, COLUMNS), tf.float32, [Box.whole(v.shape)], v.read_value)
    writing = BackgroundWriter(
        Draft(temporary(str(tmp_path), 1, "test"), {0: [whole]}, 1, {}, 1), True
    )
    UPDATES[kind](v)
    assert not np.array_equal(v.numpy(), np.ones([ROWS, COLUMNS]))
    assert latest(str(tmp_path)) is None
    gate.set()
    writing.write()
    np.testing.assert_array_equal(value(writing.commit()), np.ones([ROWS, COLUMNS]))


def test_it_is_complete_as_soon_as_all_parts_are_there(tmp_path):
    """Nobody asks for it: training may have failed."""
    leader = BackgroundWriter(begun(tmp_path, variable(1.0)), leads=True)
    leader.write()
    assert latest(str(tmp_path)) is None
    BackgroundWriter(begun(tmp_path, variable(2.0), first=1), leads=False).leave()
    leader.leave()
    path = latest(str(tmp_path))
    assert path == leader.commit()
    assert value(path)[:, 0].tolist() == [1.0] * 3 + [2.0] * 3


def test_parts_that_do_not_come_are_not_waited_for_where_training_has_failed(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(writer, "_PARTS_S", 0.01)
    leader = BackgroundWriter(begun(tmp_path, variable()), leads=True)
    leader.leave()
    assert latest(str(tmp_path)) is None and "lacks the parts of rank 1" in caplog.text
    BackgroundWriter(begun(tmp_path, variable(), first=1), leads=False).write()
    assert leader.commit() == latest(str(tmp_path))  # all the same, if they come later


@pytest.mark.parametrize("where", ["write", "commit"])
def test_what_fails_is_raised_and_in_the_log_and_leaves_nothing(
    tmp_path, monkeypatch, caplog, where
):
    def full(*_):
        raise TfparError(f"No space left on device: {tmp_path}.")

    monkeypatch.setattr(writer, "write_part" if where == "write" else "commit", full)
    with caplog.at_level(logging.ERROR, "tfpar"):
        writing = BackgroundWriter(begun(tmp_path, variable(), of=1), leads=True)
        writing.leave()
    assert f"No space left on device: {tmp_path}" in caplog.text
    with pytest.raises(TfparError, match="No space left"):
        writing.write()
        writing.commit()
    writing.discard()
    assert not os.listdir(tmp_path)


def test_what_is_discarded_while_it_waits_for_others_does_not_become_complete(tmp_path):
    leader = BackgroundWriter(begun(tmp_path, variable()), leads=True)
    leader.write()
    leader.discard()
    assert not os.listdir(tmp_path)


def test_what_is_discarded_with_all_its_parts_is_a_checkpoint_all_the_same(tmp_path, monkeypatch):
    """Another rank was lost while this one waited for the files: nothing is to be lost with it."""
    monkeypatch.setattr(writer, "_POLL_S", _WAIT_S)
    leader = BackgroundWriter(begun(tmp_path, variable()), leads=True)
    leader.write()
    BackgroundWriter(begun(tmp_path, variable(), first=1), leads=False).write()
    leader.discard()
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_a_file_system_that_does_not_answer_is_an_error_in_the_end(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(writer, "LIMIT_S", 0.01)
    writing = BackgroundWriter(begun(tmp_path, variable(), of=1), leads=True)
    for wait in (writing.write, writing.commit, writing.discard):
        with pytest.raises(TfparError, match=f"{tmp_path}.*still being written after 0 s"):
            wait()


def test_values_are_let_go_once_they_are_written(tmp_path):
    held = begun(tmp_path, variable(), of=1).held()
    held.write()
    assert not held.parts
    assert held.commit() == latest(str(tmp_path))
