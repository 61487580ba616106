"""`tf.saved_model.save` of objects with sharded variables: whole values, written once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar.tf.distributed.world import World
from tfpar.tf.interop.variable_calls import write_plainly
from tfpar.tf.interop.written_graphs import change_written_graphs, wrap_writer
from tfpar.tf.keras.files import complete
from tfpar.tf.variables.parallel_variable import ParallelVariable


def install_saved_models() -> None:
    """Wrap the function that `tf.saved_model.save` ends in, and what makes graphs for it; once."""
    wrap_writer(_writes_once)
    change_written_graphs(write_plainly)


def _writes_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, which is given whole values, by the process that leads."""

    def save(obj: Any, export_dir: Any, *args: Any, **kwargs: Any) -> Any:
        variables = [v for v in _variables(obj) if not v.is_whole]
        if not variables:
            return original(obj, export_dir, *args, **kwargs)
        path = os.fspath(export_dir)

        def write() -> None:
            file = contextlib.nullcontext(path) if "://" in path else complete(path)
            with contextlib.ExitStack() as stack:
                for variable in variables:
                    stack.enter_context(variable.whole())
                original(obj, stack.enter_context(file), *args, **kwargs)

        world = _world(variables)
        if world is None:
            return write()
        return world.lead.write(path, f"tf.saved_model.save({path!r})", write)

    return save


def _variables(obj: Any) -> list[ParallelVariable]:
    """The parallel variables that `obj` tracks, itself or within Keras's."""
    tracked = tf.train.TrackableView(obj).descendants()
    held = [t._value if isinstance(t, keras.Variable) else t for t in tracked]
    return [v for v in held if isinstance(v, ParallelVariable)]


def _world(variables: Sequence[ParallelVariable]) -> World | None:
    """The processes among which the variables are split."""
    return next((v.world for v in variables if v.world is not None), None)
