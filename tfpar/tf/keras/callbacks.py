"""Callbacks where ranks are processes: files are written once, and decisions are everyone's.

The seam is the list that Keras makes of the callbacks of `fit`, `evaluate` and `predict`. Progress
is shown by the first rank; callbacks that write files run there, and the other ranks
serve them; all others run on every rank, with the logs of the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfpar.jobs.launch.activities import end_of_epoch
from tfpar.tf.distributed.world import World
from tfpar.tf.keras.checkpoint import Checkpoint, StopSignal
from tfpar.tf.keras.model import ParallelModel

WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Callbacks that write what is equal on all ranks."""


def install_callbacks(parallel_model: Callable[[keras.Model], ParallelModel | None]) -> None:
    """Wrap the list's `__init__`; idempotent.

    Args:
        parallel_model: finds what tfpar knows of a model.
    """
    original = keras.callbacks.CallbackList.__init__
    if getattr(original, "_tfpar", False):
        return

    @functools.wraps(original)
    def init(self, callbacks=None, add_history=False, add_progbar=False, model=None, **params):
        state = parallel_model(model) if model is not None else None
        world = state.world if state is not None else None
        shown = add_progbar and (world is None or world.rank == 0)
        original(self, callbacks, add_history, shown, model, **params)
        self.callbacks.sort(key=lambda c: not getattr(c, "adds_logs", False))  # others read them
        if state is not None and "epochs" in params:  # as `fit` gives them
            epochs, steps = params["epochs"], params.get("steps")
            state.program.training_steps = None if steps is None else epochs * steps
        if world is not None:
            self.callbacks = _for_processes(self.callbacks, world)
            for callback in self.callbacks:
                callback.set_model(model)
                callback.set_params(self.params)

    init._tfpar = True  # type: ignore[attr-defined]
    keras.callbacks.CallbackList.__init__ = init


def _for_processes(
    callbacks: list[keras.callbacks.Callback], world: World
) -> list[keras.callbacks.Callback]:
    shown = [
        c for c in callbacks if world.rank == 0 or not isinstance(c, keras.callbacks.ProgbarLogger)
    ]
    backups = [c for c in shown if isinstance(c, keras.callbacks.BackupAndRestore)]
    led = [FirstRankCallback(c, world) if isinstance(c, WRITERS) else c for c in shown]
    if not any(isinstance(c, Checkpoint) for c in shown) and backups:
        led.append(
            StopSignal(
                lambda: [world.lead.run("saving before the end", c._save_model) for c in backups]
            )
        )
    return [SameLogs(world), *led]


class SameLogs(keras.callbacks.Callback):
    """Callback that gives every rank the first rank's logs of an epoch: all decide equally."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def on_epoch_end(self, epoch, logs=None):
        own = {key: float(value) for key, value in (logs or {}).items() if _is_number(value)}
        told = self._world.first(end_of_epoch(epoch + 1), lambda: own)
        if logs is not None:
            logs.update(told)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_own(hook: Callable[..., Any], name: str) -> bool:
    """Whether a callback's hook does something: it is not the one that all callbacks inherit."""
    return getattr(hook, "__func__", None) is not getattr(keras.callbacks.Callback, name)


class FirstRankCallback(keras.callbacks.Callback):
    """A callback that runs on the first rank only; the others serve it.

    Hooks of batches run there without being served, unless the callback saves at batches.
    """

    def __init__(self, callback: keras.callbacks.Callback, world: World) -> None:
        super().__init__()
        self.callback = callback
        self._world = world
        often = getattr(callback, "save_freq", "epoch") != "epoch"
        for name in dir(keras.callbacks.Callback):
            hook = getattr(callback, name)
            if name.startswith("on_") and _is_own(hook, name):
                served = often or "batch" not in name
                setattr(self, name, self._led(name, hook) if served else self._first(hook))

    def set_model(self, model):
        super().set_model(model)
        self.callback.set_model(model)

    def set_params(self, params):
        super().set_params(params)
        self.callback.set_params(params)

    def _led(self, name: str, hook: Callable[..., Any]) -> Callable[..., None]:
        what = f"{type(self.callback).__name__}.{name}"

        def call(*args: Any, **kwargs: Any) -> None:
            model = self.model

            def act() -> list[Any]:
                hook(*args, **kwargs)
                return [model._initial_epoch, bool(model.stop_training)]

            model._initial_epoch, model.stop_training = self._world.lead.run(what, act)

        return call

    def _first(self, hook: Callable[..., Any]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            if self._world.rank == 0:
                hook(*args, **kwargs)

        return call
