"""Calls by which functions that are traced while a variable is split read and write it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar.tf.interop.variables import (
    READ,
    WRITE,
    UninitializedVariable,
    add_call,
    note_use,
    traced_call,
)
from tfpar.tf.variables.states import Sharded


class UnusedHandle(UninitializedVariable):
    """Stand-in for a handle in a SavedModel whose functions hold it and do not use it.

    Each handle needs one of its own: functions that are loaded know by it which of their arguments
    is which.
    """

    def __init__(self, handle: tf.Tensor) -> None:
        super().__init__(shape=[], dtype=tf.int32, trainable=False)
        self.assign(0)  # what freezes a function that was loaded reads all that it holds
        self._stands_for = handle

    def _export_to_saved_model_graph(
        self, object_map: Any = None, tensor_map: Any = None, options: Any = None, **kwargs: Any
    ) -> list[tf.Tensor]:
        (own,) = super()._export_to_saved_model_graph(object_map, tensor_map, options, **kwargs)
        tensor_map[self._stands_for] = tensor_map[own]
        return [own, self._stands_for]


class Calls:
    """Reads and writes of one variable in one state, each a function that is traced once.

    In what leaves the process they become those of an ordinary variable
    (`tf.interop.variables`): neither its shards nor collectives are left then.

    Args:
        handle, name, shape, dtype: of the variable.
        state: while it is in force.
    """

    def __init__(
        self, handle: tf.Tensor, state: Sharded, name: str, shape: tf.TensorShape, dtype: tf.DType
    ) -> None:
        self.state = state
        self._handle = handle
        self._unused: dict[int, UnusedHandle] = {}
        self._name, self._shape, self._dtype = name, shape, dtype

    def read(self) -> tf.Tensor:
        """The whole value, in the graph that is being traced."""
        (value,) = self._add(self._read)
        value.set_shape(self._shape)  # of a call TensorFlow infers none
        return value

    def write(self, value: tf.Tensor) -> None:
        """Store the whole `value` in the graph that is being traced."""
        self._add(self._write, value)

    def unused_when_written(self) -> list[UnusedHandle]:
        """List stand-ins for the handles, of shards and the like, that traced functions hold."""
        made = [vars(self).get(name) for name in ("_read", "_write")]
        for handle in (h for function in made if function for h in function.captured_inputs):
            if id(handle) not in self._unused:
                with tf.init_scope():
                    self._unused[id(handle)] = UnusedHandle(handle)
        return list(self._unused.values())

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
