"""Loading Keras weights so that no rank reads more than it stores.

A kernel of 8192 x 8192 floats takes 256 MiB. Split by rows over four ranks, each stores 64 MiB of
it. But `model.load_weights` reads one whole array after another, so each rank would read all 256
MiB and need memory for them. While `streamed_weights` is open:

- What Keras reads of a large dataset is a `StoredValue`: a shape, a dtype, and where it is stored.
- A variable of tfpar's takes that as it is, and each rank reads the part that it stores: at once
  or, if the variable is still pending, when it is sharded.
- Anything else that Keras or a layer does with it turns it into an ordinary array.

Keras offers no seam for this, so three of its functions and `Variable.assign` are replaced for the
time being.
"""

from __future__ import annotations

import contextlib
import operator
import os
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from tfpar.tf.interop.keras_internals import in_stateless_scope, saving_lib
from tfpar.tf.variables.initial.shard_source import DatasetAt, StoredValue, open_entry, stored_dtype
from tfpar.tf.variables.parallel_variable import ParallelVariable

SMALL_BYTES = 1 << 20
"""Smaller datasets are read whole: opening the file once more costs more than it saves."""

_find_dataset = getattr(saving_lib, "safe_get_h5_dataset", operator.getitem)


@contextlib.contextmanager
def streamed_weights(small_bytes: int = SMALL_BYTES) -> Iterator[None]:
    """Let Keras load weights (`load_weights`, `load_model`) in a block without reading them whole.

    A value that its variable reads later, when it is sharded, must still be in its file by then:
    reading it raises a `TfparError` if the file has changed.

    Args:
        small_bytes: datasets of at most so many bytes are read as ever.
    """
    store = saving_lib.H5IOStore
    read, open_file, assign = store.__getitem__, store._get_h5_file, keras.Variable.assign

    def read_stored(self: Any, key: str) -> Any:
        dataset = _find_dataset(self._h5_entry_group, key)
        place = _place_of(self, dataset) if dataset.nbytes > small_bytes else None
        if place is None:
            return read(self, key)
        return StoredValue(place.open, dataset.shape, stored_dtype(dataset))

    def open_in_place(self: Any, path_or_io: Any, mode: str | None = None) -> h5py.File:
        if not self.archive or (mode or self.mode) != "r":
            return open_file(self, path_or_io, mode)
        self.io_file = open_entry(self.archive, str(path_or_io))
        return h5py.File(self.io_file, "r")

    def assign_stored(self: Any, value: Any) -> Any:
        if not isinstance(value, StoredValue):
            return assign(self, value)
        variable = self._value
        if in_stateless_scope() or not isinstance(variable, ParallelVariable):
            return assign(self, np.asarray(value))
        if value.shape != tuple(self.shape):
            raise ValueError(
                f"The stored value has shape {value.shape}, variable {self.path!r} has "
                f"{tuple(self.shape)}. Load the weights into a model of the same architecture."
            )
        dtype = tf.as_dtype(self.dtype).as_numpy_dtype
        variable.assign_stored(value.as_dtype(dtype))
        return value

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(store, "__getitem__", read_stored))
        stack.enter_context(_replaced(store, "_get_h5_file", open_in_place))
        stack.enter_context(_replaced(saving_lib, "is_memory_sufficient", _read_in_place))
        stack.enter_context(_replaced(keras.Variable, "assign", assign_stored))
        yield


def _read_in_place(model: keras.Model) -> bool:
    """Stands for Keras's check whether an archive fits into memory, and has it left where it is.

    Keras takes an error for an answer, and then reads from the archive what it needs.
    """
    raise MemoryError("weights are read where they lie")


def _place_of(store: Any, dataset: h5py.Dataset) -> DatasetAt | None:
    """Return where to find a dataset again; None if it is in memory, or may soon be deleted."""
    archive = store.archive
    path = dataset.file.filename if archive is None else archive.filename
    if path is None or not os.path.isfile(path) or _is_temporary(path):
        return None
    if archive is None:
        return DatasetAt.of(dataset, None, None)
    entry = str(store.path_or_io)
    stored = archive.getinfo(entry).compress_type == zipfile.ZIP_STORED
    return DatasetAt.of(dataset, path, entry) if stored else None


def _is_temporary(path: str) -> bool:
    """Whether a file lies in a folder of `mkdtemp`, such as Keras's copy of a remote file."""
    folder = os.path.dirname(os.path.abspath(path))
    parent, name = os.path.split(folder)
    return parent == os.path.abspath(tempfile.gettempdir()) and name.startswith(
        tempfile.gettempprefix()
    )


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while."""
    own = dict(vars(owner))
    setattr(owner, name, value)
    try:
        yield
    finally:
        if name in own:
            setattr(owner, name, own[name])
        else:  # inherited
            delattr(owner, name)
