"""Where callbacks run in a job of processes, by what their code does."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks

import tfpar as tap
from tests.tf.keras.logger_callbacks import AutoLogger, Board, MetricsLogger, Run, Table, Weights
from tfpar.spec import TfparError
from tfpar.tf.keras.callback_code import reads_model
from tfpar.tf.keras.callbacks import runs_on_first_rank

RUN = Run(Path("run.txt"))
KEPT: list[Any] = []
MODEL = SimpleNamespace(stop_training=False)


def set_rate(model: keras.Model, rate: float) -> None:
    model.optimizer.learning_rate.assign(rate)


def note(text: str) -> None:
    RUN.log({"text": text})


class Stops(Table):
    """Writes, and ends training."""

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.model.stop_training = logs["loss"] < 0.1


class Slows(Table):
    def on_epoch_begin(self, epoch, logs=None):
        set_rate(self.model, 1 / (epoch + 1))


class Evaluates(Table):
    def on_epoch_begin(self, epoch, logs=None):
        self.writer.writerow(self.model.evaluate(np.ones(3), verbose=0))


class SavesTogether(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        tap.save_checkpoint(self.model, "folder")


class Collects(callbacks.Callback):
    """Logarithms, in a list that has the name of a writer's function."""

    def on_train_begin(self, logs=None):
        self.log = []

    def on_epoch_end(self, epoch, logs=None):
        self.log.append(np.log(logs["loss"]) + math.log(2.0))
        print(self.log)


class ByHelper(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        note(f"epoch {epoch}")


class OfParent(ByHelper):
    """What it does is in a method that only its parent has, under another name."""

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        KEPT.append(epoch)


def of_own_ranks(rank: int) -> keras.callbacks.Callback:
    """As jobs of processes have them that were written for no framework."""

    class Guarded(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank == 0:
                RUN.log(logs)

    return Guarded()


class Shapes(callbacks.Callback):
    """The rank of a tensor is no process."""

    def on_epoch_end(self, epoch, logs=None):
        RUN.log({"rank": tf.rank(self.model.weights[0])})


class Callable_:
    def __call__(self, *args: Any) -> None:
        KEPT.append(args)


def on_epoch_end(function: Any) -> keras.callbacks.Callback:
    return callbacks.LambdaCallback(on_epoch_end=function)


ON_FIRST = {
    "backup": lambda: callbacks.BackupAndRestore("folder"),
    "csv": lambda: callbacks.CSVLogger("table.csv"),
    "model": lambda: callbacks.ModelCheckpoint("model.keras"),
    "remote": lambda: callbacks.RemoteMonitor(),
    "tensorboard": lambda: callbacks.TensorBoard("folder"),
    "of wandb": lambda: MetricsLogger(RUN),
    "of mlflow": lambda: AutoLogger(RUN),
    "a table": lambda: Table(Path("table.csv")),
    "of tensorboard": lambda: Board(Path("board")),
    "of orbax": lambda: Weights(RUN),
    "a helper": ByHelper,
    "a parent": OfParent,
    "ranks of tensors": Shapes,
    "a lambda": lambda: on_epoch_end(lambda epoch, logs: RUN.log(logs)),
    "a lambda's helper": lambda: on_epoch_end(lambda epoch, logs: note(str(epoch))),
    "a partial": lambda: on_epoch_end(functools.partial(lambda run, e, logs: run.log(logs), RUN)),
    "a bound method": lambda: on_epoch_end(RUN.log_batch),
    "marked": lambda: tap.on_first_rank(Stops(Path("table.csv"))),
}
ON_EVERY = {
    "early": lambda: callbacks.EarlyStopping(restore_best_weights=True),
    "history": callbacks.History,
    "schedule": lambda: callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
    "plateau": callbacks.ReduceLROnPlateau,
    "averages": callbacks.SwapEMAWeights,
    "nan": callbacks.TerminateOnNaN,
    "nothing": callbacks.LambdaCallback,
    "ends training": lambda: Stops(Path("table.csv")),
    "changes the rate": lambda: Slows(Path("table.csv")),
    "takes steps": lambda: Evaluates(Path("table.csv")),
    "calls tfpar": SavesTogether,
    "tells ranks apart": lambda: of_own_ranks(0),
    "collects": Collects,
    "a list": lambda: on_epoch_end(lambda epoch, logs: KEPT.append(logs)),
    "no code": lambda: on_epoch_end(KEPT.append),
    "an object": lambda: on_epoch_end(Callable_()),
    "setattr": lambda: on_epoch_end(lambda e, logs: (note("end"), setattr(MODEL, "a", e))),
    "checkpoint": lambda: tap.Checkpoint("folder"),
    "monitor": lambda: tap.Monitor(None),
    "timeline": lambda: tap.Timeline("t.json"),
    "marked": lambda: tap.on_every_rank(callbacks.CSVLogger("table.csv")),
}


@pytest.fixture(autouse=True)
def _in_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ON_FIRST)
def test_what_only_writes_runs_on_the_first_rank(name):
    assert runs_on_first_rank(ON_FIRST[name]())


@pytest.mark.parametrize("name", ON_EVERY)
def test_what_trains_collects_or_is_unknown_runs_on_every_rank(name):
    assert not runs_on_first_rank(ON_EVERY[name]())


@pytest.mark.skipif(not hasattr(callbacks, "OrbaxCheckpoint"), reason="Keras 3.15 has it")
def test_keras_own_orbax_checkpoint_runs_on_the_first_rank():
    callback = callbacks.OrbaxCheckpoint.__new__(callbacks.OrbaxCheckpoint)  # orbax is not needed
    assert runs_on_first_rank(callback)
    assert reads_model(callback, "on_train_batch_end")


def test_batches_are_served_only_where_the_model_is_read():
    assert reads_model(Weights(RUN, 3), "on_train_batch_end")
    assert not reads_model(MetricsLogger(RUN), "on_batch_end")
    assert not reads_model(AutoLogger(RUN), "on_batch_end")
    assert not reads_model(callbacks.TensorBoard("folder"), "on_train_batch_end")


@pytest.mark.parametrize("mark", [tap.on_first_rank, tap.on_every_rank])
def test_only_callbacks_are_marked(mark):
    callback = Collects()
    assert mark(callback) is callback
    with pytest.raises(TfparError, match="callback is 3; it must be"):
        mark(3)
