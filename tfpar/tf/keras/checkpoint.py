"""Checkpoint callback: sharded, atomic checkpoints while training, from which `fit` resumes."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from tfpar.spec import ArgumentError, Mesh, Spec, TfparError, arguments
from tfpar.tf.checkpoint import FolderLock, Reader, latest
from tfpar.tf.checkpoint.folders import DESCRIPTION
from tfpar.tf.distributed.world import on_each, on_first
from tfpar.tf.keras import saving
from tfpar.tf.keras.checkpoint_match import match_variables, pair_variables
from tfpar.tf.keras.model import ParallelModel
from tfpar.tf.keras.replay import Position, Replay
from tfpar.tf.variables.parallel_variable import ParallelVariable

logger = logging.getLogger("tfpar")

T = TypeVar("T")

TERMINATED = 128 + signal.SIGTERM
"""Exit code after a checkpoint that SIGTERM asked for."""

_IMPATIENT_S = 5.0  # a second SIGTERM after so long ends the process at once


class StopSignal(keras.callbacks.Callback):
    """SIGTERM ends training after a step, once `save` has run; on all ranks after the same one.

    Raises:
        SystemExit: with `TERMINATED`.
    """

    def __init__(self, save: Callable[[], Any]) -> None:
        super().__init__()
        self._save = save
        self._asked: float | None = None
        self._before: Any = None

    def on_train_begin(self, logs=None):
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)

    def on_train_end(self, logs=None):
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def on_train_batch_end(self, batch, logs=None):
        world = _state_of(self.model).world
        if self._asked is not None if world is None else world.lockstep.stop:
            logger.warning("SIGTERM: saving, then ending.")
            self._save()
            raise SystemExit(TERMINATED)

    def _ask(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._asked is not None and now - self._asked > _IMPATIENT_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        self._asked = self._asked or now
        world = _state_of(self.model).world
        if world is not None:
            world.lockstep.ask_to_stop()


class Checkpoint(StopSignal):
    """Callback that saves a parallel model while it trains, and resumes from what it finds.

        model.fit(dataset, epochs=10, callbacks=[tap.Checkpoint("/shared/run1", every=500)])

    Each rank writes its shards into TensorFlow's checkpoint format: weights, optimizer, metrics,
    seeds, and the position in the data. Tensors are stored as on one device, so that any mesh can
    go on. At the beginning of `fit` the last complete checkpoint of the folder is restored, and
    training goes on with the next batch; what earlier batches read is read again and passed over.
    SIGTERM saves one more, and ends the process with exit code 143.

    One run at a time writes to a folder: it holds `run.lock` there (see `tfpar.tf.checkpoint.lock`)
    while `fit` runs. A run that was killed holds nothing.

    Training goes on while files are written: a step waits for a copy of what its rank stores, in
    host memory, and until the checkpoint before is complete. The end of `fit`, an error in it,
    the end of the process, and `restore_checkpoint` and `save_checkpoint` wait for the last one.

    Args:
        folder: shared by all machines.
        every: `"epoch"`, or a number of steps.
        keep: how many checkpoints to keep.
        background: write files behind the next steps. A rank then needs as much more host memory
            as its shards take, until they are written. False: training waits for the files.

    Raises:
        ArgumentError: an argument of another type or out of range.
        TfparError: in `fit`: the model is not parallel or not built, another run writes to the
            folder, the checkpoint is damaged or another model's, or a file cannot be written. What
            was to be written behind training is in the log at once, and raised at the next
            checkpoint or at the end.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | str = "epoch",
        keep: int = 2,
        background: bool = True,
    ) -> None:
        super().__init__(self.save)
        self.folder = arguments.path("folder", folder)
        self.every = every if isinstance(every, str) and every == "epoch" else _steps(every)
        self.keep = arguments.integer("keep", keep, 1)
        self.background = arguments.flag("background", background)
        self.position = Position()
        self._saved: int | None = None
        self._resumed = False
        self._lock: FolderLock | None = None  # the first rank has it

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        saving.finish()
        state = _state_of(self.model)
        on_first(state.world, "locking a folder of checkpoints", lambda: self._take(state))
        if self._resumed:  # another fit of the same run
            return
        self._resumed = True
        path = on_first(state.world, "looking for a checkpoint", lambda: latest(self.folder))
        if path is not None:
            self.position = restore(state, path)
            self._saved = self.position.step

    def on_train_end(self, logs=None):
        try:
            saving.finish()
        finally:
            super().on_train_end(logs)
            _state_of(self.model).replay = None

    def on_epoch_begin(self, epoch, logs=None):
        if epoch != self.position.epoch:
            self.position = dataclasses.replace(self.position, epoch=epoch, batch=0)

    def on_train_batch_end(self, batch, logs=None):
        if not _state_of(self.model).trained_last:
            return  # passed over
        steps = batch + 1 - self.position.batch  # several in one execution
        step = self.position.step + steps
        self.position = dataclasses.replace(self.position, batch=batch + 1, step=step)
        if isinstance(self.every, int) and step - (self._saved or 0) >= self.every:
            self._begin()
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        done, step = max(self.position.batch, self.position.batches), self.position.step
        self.position = Position(epoch + 1, 0, done, step)
        if self.every == "epoch":
            self._begin()

    def save(self) -> str:
        """Write a checkpoint of this moment, together with all ranks, and wait for it.

        Returns its path; an empty one where it has been complete before.
        """
        return saving.finish() if self._is_saved() else self._write(saving.save)

    def _take(self, state: ParallelModel) -> None:
        self._lock = FolderLock(self.folder)
        state.fitting.callback(self._lock.release)

    def _check(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _begin(self) -> None:
        if not self._is_saved():
            self._write(saving.save_behind if self.background else saving.save)

    def _write(self, write: Callable[[ParallelModel, str, Position, int], T]) -> T:
        state = _state_of(self.model)
        on_first(state.world, "looking after the lock of a folder", self._check)
        written = write(state, self.folder, self.position, self.keep)
        self._saved = self.position.step
        return written

    def _is_saved(self) -> bool:
        return self._saved == self.position.step and bool(self.position.batch)


def _steps(every: Any) -> int:
    return arguments.integer("every", every, 1, "a number of steps, 1 or more, or 'epoch'")


class CheckpointedValue:
    """A variable's value in a checkpoint; see `initial.shard.ShardSource`."""

    def __init__(self, reader: Reader, name: str) -> None:
        self._reader = reader
        self._name = name
        self.shape = tuple(reader.shape(name))

    def __call__(self) -> tf.Tensor:
        return self._reader.read_whole(self._name)

    def read_shard(self, spec: Spec, mesh: Mesh, rank: int) -> tf.Tensor:
        return self._reader.read(self._name, spec, mesh, rank)


def restore(state: ParallelModel, path: str) -> Position:
    """Read a checkpoint into the model; each rank reads what it stores.

    Returns where its training stood; `fit` goes on from there.

    Raises:
        TfparError: the model is not built, or it is another model's checkpoint.
    """
    model = state.model
    reader, position = _restore_values(state, path)

    def restore_metrics() -> None:  # which Keras has reset at the beginning of the epoch
        metrics = {id(v._value) for v in model.metrics_variables}
        written = pair_variables(state, reader)
        for name, variable in state.named_variables().items():
            if position.batch and id(variable) in metrics and name in written:
                _assign(variable, reader, written[name])

    model._initial_epoch = position.epoch
    state.replay = Replay(position, restore_metrics)
    logger.info("Restored %s: epoch %d, batch %d.", path, position.epoch, position.batch)
    return position


def save_checkpoint(model: keras.Model, folder: str | os.PathLike[str], keep: int = 2) -> str:
    """Write a checkpoint of a parallel model, as `Checkpoint` does, and wait until it is complete.

        for step, batch in enumerate(dataset):
            model.train_on_batch(*batch)
            if step % 500 == 499:
                tap.save_checkpoint(model, "/shared/run1")

    Where ranks are processes, all call it. Its step is what the optimizer has counted.

    Args:
        folder: of checkpoints, shared by all machines.
        keep: how many checkpoints to keep there.

    Returns:
        The checkpoint's path, `folder/step-00000500`. An ordinary TensorFlow checkpoint of whole
        tensors, named by Keras paths: `tf.train.load_checkpoint(f"{path}/tensors")`.

    Raises:
        TfparError: the model is not parallel or not built, or a file cannot be written.
    """
    state, folder, keep = (
        _built_state_of(model),
        arguments.path("folder", folder),
        arguments.integer("keep", keep, 1),
    )
    optimizer = getattr(model, "optimizer", None)
    step = 0 if optimizer is None else int(optimizer.iterations)
    return saving.save(state, folder, Position(step=step), keep)


def restore_checkpoint(model: keras.Model, path: str | os.PathLike[str]) -> Position:
    """Read a checkpoint of `Checkpoint` or `save_checkpoint` into a parallel model.

    Weights, optimizer, metrics and seeds, whatever mesh wrote them; each rank reads what it
    stores. Where ranks are processes, all call it.

    Args:
        path: a checkpoint, or a folder of checkpoints, whose last complete one is taken.

    Returns:
        Where training stood: `epoch`, `batch`, and `step` in all. A loop of one's own goes on from
        there; so does `fit` with `callbacks=[Checkpoint(folder)]`, by itself.

    Raises:
        TfparError: the model is not parallel or not built, there is no complete checkpoint, it is
            damaged, or it is of another model: then all that differs is named, and nothing is
            restored, on any rank.
    """
    state, given = _built_state_of(model), arguments.path("path", path)
    saving.finish()
    world = state.world
    found = on_first(world, "looking for a checkpoint", lambda: latest(given) or given)
    return _restore_values(state, found)[1]


class _Opened(NamedTuple):
    """A checkpoint that fits the model.

    Attributes:
        written: its name of each variable of the model.
        position: where training stood.
    """

    reader: Reader
    written: dict[str, str]
    position: Position

    @classmethod
    def of(cls, state: ParallelModel, path: str) -> _Opened:
        reader = Reader(path)
        return cls(reader, match_variables(state, reader), _position(reader))


def _restore_values(state: ParallelModel, path: str) -> tuple[Reader, Position]:
    """Assign what all variables had, on all ranks or on none if the checkpoint does not fit.

    Returns the checkpoint, and where training stood.
    """
    _check_built(state.model)
    state.build_optimizer(force=True)
    opened: list[_Opened] = []
    on_each(state.world, "opening a checkpoint", lambda: opened.append(_Opened.of(state, path)))
    reader, written, position = opened[0]

    def assign() -> None:
        for name, variable in state.named_variables().items():
            _assign(variable, reader, written[name])

    on_each(state.world, "reading a checkpoint", assign)
    return reader, position


def _position(reader: Reader) -> Position:
    """Return the position of training that a checkpoint holds; the start for one not of tfpar."""
    if reader.step is None:
        return Position()
    try:
        position = Position.read(reader.info)
    except ArgumentError as error:
        raise reader.damaged(f"{DESCRIPTION}: {str(error).removesuffix('.')}") from None
    if position.step != reader.step:
        raise reader.damaged(
            f"{DESCRIPTION}: info.step is {position.step}, and step is {reader.step}"
        )
    return position


def _assign(variable: tf.Variable, reader: Reader, name: str) -> None:
    if isinstance(variable, ParallelVariable):
        variable.assign_stored(CheckpointedValue(reader, name))
    else:
        variable.assign(reader.read_whole(name))


def _state_of(model: keras.Model) -> ParallelModel:
    from tfpar.tf.keras.adapter import state_of  # which needs the callbacks, and these this module

    return state_of(model)


def _built_state_of(model: keras.Model) -> ParallelModel:
    state = _state_of(model)
    _check_built(model)
    return state


def _check_built(model: keras.Model) -> None:
    if not model.built:
        raise TfparError(
            f"Model {model.name!r} is not built, so that a checkpoint can neither be made of it "
            f"nor restored into it: give it an Input, or call it on a batch first."
        )
