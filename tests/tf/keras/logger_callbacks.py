"""Callbacks in the shape of those that loggers bring along, and a place that they write to."""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras


class Run:
    """A logger's run: a file of a line for each call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, values: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(f"{values}\n")

    def log_batch(self, metrics: list[tuple[str, float]], step: int) -> None:
        self.log({"step": step, **dict(metrics)})


class MetricsLogger(keras.callbacks.Callback):
    """Weights & Biases': the rate goes with the metrics, which are logged under other names."""

    def __init__(self, run: Run, log_freq: str | int = "epoch") -> None:
        super().__init__()
        self.run, self.log_freq = run, log_freq
        self.run.owner = self  # type: ignore[attr-defined] # no matter what is set here
        self.global_batch = 0

    def _get_rate(self) -> float:
        return float(self.model.optimizer.learning_rate.numpy().item())

    def on_epoch_end(self, epoch, logs=None):
        logs = {} if logs is None else {f"epoch/{k}": v for k, v in logs.items()}
        logs["epoch/epoch"] = epoch
        logs["epoch/learning_rate"] = self._get_rate()
        self.run.log(logs)

    def on_batch_end(self, batch, logs=None):
        self.global_batch += 1
        if self.log_freq != "epoch" and self.global_batch % int(self.log_freq) == 0:
            self.run.log({f"batch/{k}": v for k, v in (logs or {}).items()})


def safe(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose errors do not end training."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ArithmeticError:
            return None

    return call


class AutoLogger(keras.callbacks.Callback):
    """MLflow's: all its methods are wrapped, and what the optimizer is goes to the run."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.client = run

    @safe
    def on_train_begin(self, logs=None):
        summary: list[str] = []
        self.model.summary(print_fn=lambda line, *args, **kwargs: summary.append(line))
        self.client.log({"lines": len(summary), **self.model.optimizer.get_config()})

    @safe
    def on_epoch_end(self, epoch, logs=None):
        self._log_metrics(logs or {}, epoch)

    @safe
    def on_batch_end(self, batch, logs=None):
        steps = int(self.model.optimizer.iterations.numpy())
        if steps % 100 == 0:
            self._log_metrics(logs or {}, steps)

    def _log_metrics(self, logs: dict[str, float], step: int) -> None:
        self.client.log_batch(list(logs.items()), step)


class Table(keras.callbacks.Callback):
    """A file of comma-separated values, which has a row an epoch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_begin(self, logs=None):
        self.file = open(self.path, "a", newline="")  # noqa: SIM115 - closed at the end
        self.writer = csv.writer(self.file)

    def on_epoch_end(self, epoch, logs=None):
        self.writer.writerow([epoch, *(logs or {}).values()])

    def on_train_end(self, logs=None):
        self.file.close()


class Board(keras.callbacks.Callback):
    """TensorBoard's: each process that is told of a model makes a file of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def set_model(self, model):
        self._model = model
        self.folder.mkdir(exist_ok=True)
        self.summary = Summary(self.folder / f"events.{os.getpid()}")

    def on_epoch_end(self, epoch, logs=None):
        for name, value in (logs or {}).items():
            self.summary.scalar(f"epoch_{name}", value, step=epoch)
        for weight in self.model.weights:
            self.summary.histogram(weight.path, weight, step=epoch)


class Summary(Run):
    """Values by name and step, of which it writes lines."""

    def scalar(self, name: str, value: float, step: int) -> None:
        self.log({"name": name, "value": value, "step": step})

    def histogram(self, name: str, weight: Any, step: int) -> None:
        self.scalar(name, float(keras.ops.max(weight)), step)


class Weights(keras.callbacks.Callback):
    """Orbax's: the whole state, at epochs or at so many batches, where it is better than before."""

    def __init__(self, checkpointer: Any, save_freq: str | int = "epoch") -> None:
        super().__init__()
        self.checkpointer, self.save_freq, self.best = checkpointer, save_freq, float("inf")

    def set_model(self, model):
        super().set_model(model)
        self.batches = int(model.optimizer.iterations)

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.save_freq != "epoch" and self.batches % int(self.save_freq) == 0:
            self._save(self.batches)

    def on_epoch_end(self, epoch, logs=None):
        if self.save_freq == "epoch" and logs["loss"] < self.best:
            self.best = logs["loss"]
            self._save(epoch)

    def _save(self, step: int) -> None:
        state = self.model.get_state_tree(value_format="numpy_array")
        self.checkpointer.save_checkpointables(step, state)

    def on_train_end(self, logs=None):
        self.checkpointer.close()
