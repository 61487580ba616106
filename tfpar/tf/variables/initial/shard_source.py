"""Initial values stored in an HDF5 dataset, read box by box."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import h5py
import ml_dtypes
import numpy as np

from tfpar.spec import Mesh, Spec, TfparError
from tfpar.tf.variables.initial.shard_map import ShardMap, row_dim

WEIGHTS_ENTRY = "model.weights.h5"
"""Where a `.keras` archive has its weights."""

LIMIT_BYTES = 8 << 20
"""What is read at a time."""

Box = tuple[int | slice, ...]
"""An index of a dataset: a hyperslab."""


class StoredValue:
    """Value stored in an HDF5 dataset; an array to whoever needs it whole.

    Args:
        open_dataset: gives a context manager of the `h5py.Dataset`.
        shape: of the dataset.
        dtype: what the value is cast to when it is read.
    """

    def __init__(
        self,
        open_dataset: Callable[[], contextlib.AbstractContextManager[h5py.Dataset]],
        shape: Sequence[int],
        dtype: Any,
    ) -> None:
        self._open = open_dataset
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def as_dtype(self, dtype: Any) -> StoredValue:
        """The same dataset, read as `dtype`."""
        return StoredValue(self._open, self.shape, dtype)

    def __call__(self) -> np.ndarray:
        """The whole value."""
        with self._open() as dataset:
            return self._read(dataset, ())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self() if dtype is None else self().astype(dtype, copy=False)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        return self()[key]

    def read_shard(
        self, spec: Spec, mesh: Mesh, rank: int, *, limit_bytes: int = LIMIT_BYTES
    ) -> np.ndarray:
        """The shard that `rank` stores; reads what it needs, at most `limit_bytes` at a time."""
        held = ShardMap(self.shape, spec, mesh, rank)
        shard = np.empty(held.local_shape, self.dtype)
        self.read_into(shard, held, limit_bytes)
        return shard

    def read_into(self, target: np.ndarray, held: ShardMap, limit_bytes: int = LIMIT_BYTES) -> None:
        """Fill `target`, of the shape of the shard `shard_map`."""
        with self._open() as dataset:
            if not self.shape:
                target[...] = self._read(dataset, ())
                return
            dim = row_dim(self.shape, self.dtype.itemsize, limit_bytes)
            row_bytes = held.row_size(dim) * self.dtype.itemsize
            step = max(1, limit_bytes // max(row_bytes, 1))
            for start in range(0, math.prod(self.shape[: dim + 1]), step):
                stop = min(start + step, math.prod(self.shape[: dim + 1]))
                for copy in held.copies(dim, start, stop):
                    box: Box = (*copy.prefix, copy.rows, *held.spans(dim))
                    target[copy.target] = held.take(self._read(dataset, box), dim)

    def _read(self, dataset: h5py.Dataset, box: Box) -> np.ndarray:
        if dataset.shape != self.shape:
            raise TfparError(
                f"Dataset {dataset.name!r} of {dataset.file.filename!r} has shape {dataset.shape}, "
                f"and had {self.shape} when it was opened first: the file was written again. Load "
                f"the weights again."
            )
        values = np.asarray(dataset[box])
        if values.dtype.kind == "V":
            values = values.view(stored_dtype(dataset))
        return values.astype(self.dtype, copy=False)


def stored_dtype(dataset: h5py.Dataset) -> np.dtype:
    """The dtype of the values of a dataset of Keras's.

    HDF5 knows no bfloat16 and its like: Keras stores the bytes, and the name beside them.
    """
    if dataset.dtype.kind != "V":
        return dataset.dtype
    name = dataset.attrs.get("dtype")
    if name is None or not hasattr(ml_dtypes, str(name)):
        raise TfparError(
            f"Dataset {dataset.name!r} of {dataset.file.filename!r} holds opaque values of "
            f"{dataset.dtype.itemsize} bytes and does not say what they are. Save the weights "
            f"with Keras 3, or load them outside of auto_parallel."
        )
    return np.dtype(getattr(ml_dtypes, str(name)))


@dataclasses.dataclass(frozen=True)
class DatasetAt:
    """A dataset of a weights file, to be opened whenever it is read.

    Attributes:
        path: a `.h5` file, or an archive that holds one.
        entry: the file's name in the archive; None without one.
        name: the dataset's path in the file.
        version: size and time of last change of `path` when the dataset was found.
    """

    path: str
    entry: str | None
    name: str
    version: tuple[int, int]

    @classmethod
    def of(cls, dataset: h5py.Dataset, archive: str | None, entry: str | None) -> DatasetAt:
        """Return the location at which `dataset`, open now, is found again."""
        path = os.path.abspath(archive or dataset.file.filename)
        return cls(path, entry, dataset.name, file_version(path))

    @contextlib.contextmanager
    def open(self) -> Iterator[h5py.Dataset]:
        """The dataset.

        Raises:
            TfparError: the file has changed, or is gone.
        """
        if not os.path.exists(self.path) or file_version(self.path) != self.version:
            raise TfparError(
                f"Weights file {self.path!r} was changed or removed after load_weights and before "
                f"{self.name!r} was read from it. Load the weights again."
            )
        with open_keras_weights(self.path, self.entry or WEIGHTS_ENTRY) as file:
            yield file[self.name]


def file_version(path: str) -> tuple[int, int]:
    """Return size and modification time of a file, which tell whether it was written again."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def open_keras_weights(path: str | os.PathLike, entry: str = WEIGHTS_ENTRY) -> Iterator[h5py.File]:
    """The HDF5 file of a `.weights.h5` file or a `.keras` archive, open for reading.

    The file in an archive is read where it lies; one that is compressed is extracted to a
    temporary file first.
    """
    if h5py.is_hdf5(path):
        with h5py.File(path, "r") as file:
            yield file
        return
    with zipfile.ZipFile(path) as archive, open_entry(archive, entry) as stream:
        with h5py.File(stream, "r") as file:
            yield file


def open_entry(archive: zipfile.ZipFile, entry: str) -> IO[bytes]:
    """A seekable file of an archive's entry, which is not read into memory."""
    info = archive.getinfo(entry)
    if info.compress_type == zipfile.ZIP_STORED and archive.filename is not None:
        return io.BufferedReader(_Section(archive.filename, info), _BUFFER)
    extracted = tempfile.TemporaryFile(dir=Path(archive.filename or ".").parent)
    with archive.open(info) as source:
        shutil.copyfileobj(source, extracted, LIMIT_BYTES)
    extracted.seek(0)
    return extracted


_BUFFER = 1 << 16
_LOCAL_HEADER = 30  # bytes of a zip entry's own header before its name
_NAME_LENGTHS = slice(26, 30)  # in it: lengths of the name and of the extra field


class _Section(io.RawIOBase):
    """An uncompressed entry of a zip file as a file of its own."""

    def __init__(self, path: str, info: zipfile.ZipInfo) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        header = os.pread(self._file.fileno(), _LOCAL_HEADER, info.header_offset)
        lengths = header[_NAME_LENGTHS]
        names = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        self._begin = info.header_offset + _LOCAL_HEADER + names
        self._size = info.file_size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        count = os.preadv(self._file.fileno(), [view], self._begin + self._at) if view else 0
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
