"""Callbacks where ranks are processes: files are written once, and decisions are everyone's.

The seam is the list that Keras makes of the callbacks of `fit`, `evaluate` and `predict`. Progress
is shown by the first rank. Callbacks that write, and do not take part in training, run there, and
the other ranks serve them; all others run on every rank, with the logs of the first.
`callback_code` tells them apart by what their code does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
from keras import tree

from tfpar.jobs.launch.activities import end_of_epoch
from tfpar.spec import arguments
from tfpar.tf.distributed.world import World
from tfpar.tf.keras.callback_code import own_hooks, reads_model, takes_part_in_training, writes
from tfpar.tf.keras.checkpoint import Checkpoint, StopSignal
from tfpar.tf.keras.model import ParallelModel

C = TypeVar("C", bound=keras.callbacks.Callback)

_MARK = "_tfpar_on_first_rank"


def on_first_rank(callback: C) -> C:
    """Have a callback run on the first rank only, where ranks are processes.

        model.fit(x, y, callbacks=[tap.on_first_rank(MyLogger())])

    For one that writes files or lines of a logger, where its code does not show it. The other
    ranks hand it the weights that it reads, in every hook. They have what it changes of `logs`, and
    whether it ends training, but neither its attributes nor what it assigns to variables: a
    callback that does so belongs on every rank.

    Returns:
        The callback.

    Raises:
        ArgumentError: it is no Keras callback.
        TfparError: in `fit`, where it takes a step of the model, as `evaluate` and `predict` do.
    """
    return _marked(callback, True)


def on_every_rank(callback: C) -> C:
    """Have a callback run on every rank, also if it writes; the converse of `on_first_rank`.

        losses = tap.on_every_rank(MyLosses("losses.csv"))

    For one whose attributes every rank reads after `fit`, or which writes into a folder of each
    rank's own.

    Returns:
        The callback.

    Raises:
        ArgumentError: it is no Keras callback.
    """
    return _marked(callback, False)


def _marked(callback: C, first: bool) -> C:
    arguments.instance("callback", callback, keras.callbacks.Callback)
    setattr(callback, _MARK, first)
    return callback


def runs_on_first_rank(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback runs on the first rank only: as it was marked, else by its code."""
    marked = getattr(callback, _MARK, None)
    if marked is None:
        return writes(callback) and not takes_part_in_training(callback)
    return bool(marked)


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
        if world is not None:
            callbacks = _for_processes(tree.flatten(callbacks or []), world)
        original(self, callbacks, add_history, shown, model, **params)
        self.callbacks.sort(key=lambda c: not getattr(c, "adds_logs", False))  # others read them
        if state is not None and "epochs" in params:  # as `fit` gives them
            epochs, steps = params["epochs"], params.get("steps")
            state.program.training_steps = None if steps is None else epochs * steps

    init._tfpar = True  # type: ignore[attr-defined]
    keras.callbacks.CallbackList.__init__ = init


def _for_processes(
    callbacks: Sequence[keras.callbacks.Callback], world: World
) -> list[keras.callbacks.Callback]:
    bars = [c for c in callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]
    others = [c for c in callbacks if c not in bars]
    backups = [c for c in others if isinstance(c, keras.callbacks.BackupAndRestore)]
    placed = [FirstRankCallback(c, world) if runs_on_first_rank(c) else c for c in others]
    if not any(isinstance(c, Checkpoint) for c in others) and backups:
        placed.append(
            StopSignal(
                lambda: [world.lead.run("saving before the end", c._save_model) for c in backups]
            )
        )
    return [SameLogs(world), *placed, *(bars if world.rank == 0 else ())]


class SameLogs(keras.callbacks.Callback):
    """Callback that gives every rank the first rank's logs of an epoch: all decide equally."""

    adds_logs = True

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def on_epoch_end(self, epoch, logs=None):
        told = self._world.first(end_of_epoch(epoch + 1), lambda: _numbers(logs))
        if logs is not None:
            logs.update(told)


def _numbers(logs: Any) -> dict[str, float]:
    return {key: float(value) for key, value in (logs or {}).items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


class FirstRankCallback(keras.callbacks.Callback):
    """A callback that runs on the first rank only; the others serve it.

    A hook of batches runs there without being served, which costs a message, if nothing says that
    it reads the model: it reads nothing of it in its code, or saves at the end of epochs only.
    """

    def __init__(self, callback: keras.callbacks.Callback, world: World) -> None:
        super().__init__()
        self.callback = callback
        self._world = world
        for name in own_hooks(callback):
            if name.startswith("on_"):
                hook = getattr(callback, name)
                act = self._led if self._is_served(name) else self._first
                setattr(self, name, act(f"{type(callback).__name__}.{name}", hook))

    def _is_served(self, name: str) -> bool:
        if "batch" not in name or getattr(self.callback, _MARK, False):
            return True
        saves_by_epoch = getattr(self.callback, "save_freq", None) == "epoch"
        return not saves_by_epoch and reads_model(self.callback, name)

    def set_model(self, model):
        super().set_model(model)
        self._set("set_model", model)

    def set_params(self, params):
        super().set_params(params)
        self._set("set_params", params)

    def _set(self, name: str, value: Any) -> None:
        """Call a hook that sets what the callback works on; one of its own may write already."""
        if name not in own_hooks(self.callback):
            getattr(self.callback, name)(value)
            return
        if self._world.rank:
            getattr(keras.callbacks.Callback, name)(self.callback, value)

        def act() -> None:
            getattr(self.callback, name)(value)

        self._world.lead.run(f"{type(self.callback).__name__}.{name}", act)

    def _led(self, what: str, hook: Callable[..., Any]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            model = self.model
            logs = next((a for a in (*args, *kwargs.values()) if isinstance(a, dict)), {})

            def act() -> list[Any]:
                before = _numbers(logs)
                hook(*args, **kwargs)
                changed = dict(_numbers(logs).items() - before.items())
                return [model._initial_epoch, bool(model.stop_training), changed]

            model._initial_epoch, model.stop_training, changed = self._world.lead.run(what, act)
            logs.update(changed)

        return call

    def _first(self, what: str, hook: Callable[..., Any]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            if self._world.rank == 0:
                with self._world.lead.alone(what):
                    hook(*args, **kwargs)

        return call
