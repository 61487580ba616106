"""Calls by which functions that are traced while a variable is split read and write it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar.interop.variable_calls import READ, WRITE, add_call, traced_call
from tfpar.interop.variables import note_use
from tfpar.variables.states import Sharded


class Calls:
    """Reads and writes of one variable in one state, each a function that is traced once.

    In what leaves the process they become those of an ordinary variable
    (`interop.variable_calls`): neither its shards nor collectives are left then.

    Args:
        handle, name, shape, dtype: of the variable.
        state: while it is in force.
    """

    def __init__(
        self, handle: tf.Tensor, state: Sharded, name: str, shape: tf.TensorShape, dtype: tf.DType
    ) -> None:
        self.state = state
        self._handle = handle
        self._name, self._shape, self._dtype = name, shape, dtype

    def read(self) -> tf.Tensor:
        """The whole value, in the graph that is being traced."""
        (value,) = self._add(self._read)
        return value

    def write(self, value: tf.Tensor) -> None:
        """Store the whole `value` in the graph that is being traced."""
        self._add(self._write, value)

    @property
    def variables(self) -> list[tf.Variable]:
        """What they use behind the handle, if any was called: functions hold it too."""
        made = [vars(self).get(name) for name in ("_read", "_write")]
        used = [v for function in made if function is not None for v in function.graph.variables]
        return list({id(v): v for v in used}.values())

    def _add(self, function: Any, *values: tf.Tensor) -> Sequence[tf.Tensor]:
        for variable in function.graph.variables:
            note_use(variable)
        return add_call(function, self._handle, *values)

    @functools.cached_property
    def _read(self) -> Any:
        return traced_call(READ, lambda: self.state.assemble(self._name, self._shape, self._dtype))

    @functools.cached_property
    def _write(self) -> Any:
        return traced_call(WRITE, self.state.assign, tf.TensorSpec(self._shape, self._dtype))
