"""Reading a checkpoint: any rank of any mesh takes the slices that it stores."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.readable import UnreadableError
from tfpar.spec import Mesh, Spec, TfparError, local_indices, local_shape
from tfpar.tf.checkpoint import folders
from tfpar.tf.checkpoint.boxes import Box, find_runs
from tfpar.tf.checkpoint.files import is_sliceable
from tfpar.tf.checkpoint.index import FORMAT_VERSION, Index, NewerFormatError, read_index
from tfpar.tf.variables.values import cut_shard


class Reader:
    """A checkpoint that `commit` published, or any TensorFlow checkpoint.

    Args:
        path: the checkpoint's folder (see `latest`), or the prefix of a TensorFlow
            checkpoint's files.

    Raises:
        TfparError: there is none, it is incomplete or damaged, or a newer version wrote it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._prefix = path
        self._index: Index | None = None
        if os.path.isdir(path) or not os.path.exists(f"{path}.index"):
            self._prefix = os.path.join(path, folders.TENSORS)
            self._index = self._read_index()
            self._check_files(self._index)
        try:
            reader = tf.train.load_checkpoint(self._prefix)
            shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            raise self.damaged(f"its tensors cannot be read: {error}") from error
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._dtypes = dict(dtypes)
        if self._index is not None and set(self._index.tensors) != set(self._shapes):
            raise self.damaged(f"{folders.DESCRIPTION} lists other tensors than there are")

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._shapes)

    @property
    def step(self) -> int | None:
        """Training step; None for a checkpoint that tfpar did not write."""
        return None if self._index is None else self._index.step

    @property
    def info(self) -> dict[str, Any]:
        """Information given to `commit`; empty for a checkpoint that tfpar did not write."""
        return {} if self._index is None else self._index.info

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a logical tensor; TfparError if there is none of this name."""
        self._check_names([name])
        return self._shapes[name]

    def dtype(self, name: str) -> tf.DType:
        """Return the dtype of a tensor; TfparError if there is none of this name."""
        self._check_names([name])
        return self._dtypes[name]

    def read(self, name: str, spec: Spec, mesh: Mesh, rank: int) -> tf.Tensor:
        """The shard that `rank` stores; padding repeats the last entry.

        Only the stored slices that hold it are read, one after another; `commit` leaves none
        larger than `files.SLICE_BYTES`. Of types whose slices TensorFlow does not read (float16,
        unsigned integers over 8 bits) the whole tensor is read.

        Raises:
            TfparError: no tensor of this name, or the files are damaged.
        """
        shape, dtype = self.shape(name), self.dtype(name)
        with tf.device("CPU:0"):
            if 0 in shape:
                return tf.zeros(local_shape(shape, spec, mesh), dtype)
            if not is_sliceable(dtype):
                return cut_shard(self.read_whole(name), spec, mesh, rank)
            stored = [_stored(shape, dim, spec, mesh, rank) for dim in range(len(shape))]
            needed = [np.unique(index) for index in stored]
            value = self._read_product(name, needed)
            for dim, (index, read) in enumerate(zip(stored, needed, strict=True)):
                if len(index) != len(read):
                    value = tf.gather(value, np.searchsorted(read, index), axis=dim)
            return value

    def read_whole(self, name: str) -> tf.Tensor:
        """The logical tensor; TfparError as for `read`."""
        self._check_names([name])
        return self._restore(name, [""])[0]

    def _read_product(self, name: str, needed: Sequence[np.ndarray]) -> tf.Tensor:
        """The entries at the product of sorted indices, as few slices as hold them."""
        shape = self._shapes[name]
        by_dim = [find_runs(index) for index in needed]
        slices = [
            Box(
                tuple(begin for begin, _, _ in box), tuple(size for _, size, _ in box), ()
            ).slice_spec(shape)
            for box in itertools.product(*by_dim)
        ]
        return _concat(iter(self._restore(name, slices)), [len(found) for found in by_dim])

    def _restore(self, name: str, slices: Sequence[str]) -> list[tf.Tensor]:
        try:
            restored: list[tf.Tensor] = tf.raw_ops.RestoreV2(
                prefix=self._prefix,
                tensor_names=[name] * len(slices),
                shape_and_slices=slices,
                dtypes=[self._dtypes[name]] * len(slices),
            )
        except tf.errors.OpError as error:
            raise self.damaged(f"{name!r} cannot be read: {error}") from error
        return restored

    # --- errors ------------------------------------------------------------------

    def _read_index(self) -> Index:
        path = os.path.join(self.path, folders.DESCRIPTION)
        if not os.path.isdir(self.path):
            raise TfparError(f"There is no checkpoint {self.path}. {self._other()}")
        if folders.is_temporary(self.path) or not os.path.isfile(path):
            raise TfparError(
                f"{self.path} is not a complete checkpoint: writing it was interrupted or is not "
                f"over yet, or it is a folder of checkpoints. {self._other()}"
            )
        try:
            return read_index(path)
        except UnreadableError as error:
            raise self.damaged(f"{folders.DESCRIPTION} cannot be read: {error}") from error
        except NewerFormatError as error:
            raise TfparError(
                f"The checkpoint {self.path} has format {error.version}; this version of tfpar "
                f"reads up to {FORMAT_VERSION}. Upgrade tfpar, or read {self._prefix} as a "
                f"TensorFlow checkpoint."
            ) from None

    def _check_files(self, index: Index) -> None:
        named = folders.step_in(self.path)
        if named is not None and named != index.step:
            raise self.damaged(
                f"{folders.DESCRIPTION} is of step {index.step}, and the folder's name of step "
                f"{named}"
            )
        there = set(os.listdir(self.path))
        for name, size in index.files.items():
            found = os.path.getsize(os.path.join(self.path, name)) if name in there else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise self.damaged(f"{name} {state}")

    def _check_names(self, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in self._shapes]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise TfparError(
                f"The checkpoint {self.path} has no {', '.join(map(repr, missing[:5]))}{more}. It "
                f"has {len(self._shapes)} tensors: {', '.join(self.names[:5])}, ... Was it saved "
                f"from the same model?"
            )

    def damaged(self, what: str) -> TfparError:
        """The error that says what is wrong with its files, and which checkpoint is whole."""
        return TfparError(f"The checkpoint {self.path} is damaged: {what}. {self._other()}")

    def _other(self) -> str:
        """The last complete checkpoint in or beside the path, other than itself."""
        here = os.path.abspath(self.path)
        for folder in (here, os.path.dirname(here)):
            others = [path for path in folders.checkpoints(folder) if path != here]
            if others:
                return f"The last complete one is {others[-1]}."
        return f"There is no other in {os.path.dirname(here)}."


def _stored(shape: Sequence[int], dim: int, spec: Spec, mesh: Mesh, rank: int) -> np.ndarray:
    """Logical index of each stored entry along `dim`, padding that of the last one."""
    index = local_indices(shape[dim], dim, spec, mesh, mesh.coordinates(rank))
    return np.where(index < 0, shape[dim] - 1, index)


def _concat(pieces: Iterator[tf.Tensor], counts: Sequence[int], dim: int = 0) -> tf.Tensor:
    """Put a row-major grid of pieces together, `counts` of them along each dimension."""
    if dim == len(counts):
        return next(pieces)
    row = [_concat(pieces, counts, dim + 1) for _ in range(counts[dim])]
    return row[0] if len(row) == 1 else tf.concat(row, axis=dim)
