"""Writing a checkpoint: every rank its boxes, in parallel; then one rank makes it one checkpoint.

    every rank   write_part(temporary, rank, tensors)      parts/part-00002-000.data-..., .json
    (all wait for all)
    one rank     commit(temporary, num_ranks, info)        tensors.index, tensors.data-...

The commit renames the data files of the parts and writes a common index: values are not read
again. What it publishes is an ordinary TensorFlow checkpoint of whole tensors,
`tf.train.load_checkpoint(f"{path}/tensors")`.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tfpar
from tfpar.readable import UnreadableError
from tfpar.spec import TfparError
from tfpar.tf.checkpoint import folders
from tfpar.tf.checkpoint.boxes import Box, covers
from tfpar.tf.checkpoint.index import (
    FORMAT_VERSION,
    Entry,
    Index,
    IndexPart,
    read_part,
    write_sealed,
)

# Values of one file are in host memory together while it is written.
BUNDLE_BYTES = 256 << 20

# To take a part of a stored slice TensorFlow reads all of it: no more than this is read in vain.
SLICE_BYTES = 64 << 20

# TensorFlow writes slices of every type, but of others than these it reads back only the slices
# that were written (`BundleReader::GetSliceValue`, TensorFlow 2.21).
_SLICEABLE = {
    tf.bool,
    tf.int8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.uint8,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.complex64,
    tf.complex128,
}


@dataclasses.dataclass(frozen=True)
class TensorWrite:
    """Write request of one rank for a logical tensor.

    Attributes:
        shape: of the logical tensor.
        boxes: from `list_boxes`; none where another rank writes them.
        read: gives the shard, padding included; called once, when its file is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType
    boxes: Sequence[Box]
    read: Callable[[], tf.Tensor]

    def held(self) -> TensorWrite:
        """The same with the shard of this moment, in host memory.

        A tensor that was read never changes: TensorFlow gives a variable that is updated other
        memory, as long as somebody holds what lay in it.
        """
        if not self.boxes:
            return self
        with tf.device("CPU:0"):
            value = tf.identity(self.read())
        return dataclasses.replace(self, read=lambda: value)

    @property
    def num_bytes(self) -> int:
        itemsize: int = self.dtype.size
        return sum(math.prod(box.size) for box in self.boxes) * itemsize

    @property
    def slices(self) -> Iterator[Box]:
        """Boxes in the granularity of the file: each is written as one slice."""
        for box in self.boxes:
            if is_sliceable(self.dtype):
                yield from box.stripes(SLICE_BYTES // self.dtype.size)
            else:
                yield box

    @property
    def is_joined(self) -> bool:
        """Whether TensorFlow could not read the tensor from slices."""
        return not is_sliceable(self.dtype) and any(b.slice_spec(self.shape) for b in self.boxes)


def is_sliceable(dtype: tf.DType) -> bool:
    """Whether TensorFlow reads any slice of a stored tensor of this type."""
    return dtype in _SLICEABLE


# --- every rank ----------------------------------------------------------------------


def write_part(folder: str, rank: int, tensors: Sequence[TensorWrite]) -> None:
    """Write what `rank` has to write into the temporary folder, through to the disk.

    A shard that is one box without padding is written from where it lies; others are copied
    box by box, at most `BUNDLE_BYTES` (or one shard) at a time.

    Args:
        folder: from `folders.temporary_folder`, on a file system that all ranks share.

    Raises:
        TfparError: a file cannot be written.
    """
    folders.step_of(folder)
    parts = os.path.join(folder, "parts")
    try:
        os.makedirs(parts, exist_ok=True)
        written = _write_bundles(os.path.join(parts, f"part-{rank:05d}"), tensors)
        write_sealed(_part_path(folder, rank), IndexPart(tuple(written)))
    except (OSError, tf.errors.OpError) as error:
        raise TfparError(
            f"Rank {rank} could not write its part of the checkpoint {folder}: {error}"
        ) from error


def _write_bundles(prefix: str, tensors: Sequence[TensorWrite]) -> list[Entry]:
    """Write tensors to files that start with `prefix`; returns what lies where.

    What others write is named too: whoever commits learns from each part what there has to be.
    """
    written = [_entry(saved, "") for saved in tensors if not saved.boxes]
    for number, bundle in enumerate(_bundles(tensors)):
        path = f"{prefix}-{number:03d}"
        _write_bundle(path, bundle)
        written += [_entry(saved, os.path.basename(path)) for saved in bundle]
    return written


def _entry(saved: TensorWrite, bundle: str) -> Entry:
    boxes = tuple((box.begin, box.size) for box in saved.boxes)
    return Entry(saved.name, saved.shape, saved.dtype.name, bundle, saved.is_joined, boxes)


def _bundles(tensors: Sequence[TensorWrite]) -> Iterator[list[TensorWrite]]:
    """Group tensors into bundles of at most `BUNDLE_BYTES`; each becomes one file."""
    for joined in (False, True):
        bundle: list[TensorWrite] = []
        num_bytes = 0
        for saved in tensors:
            if not saved.boxes or saved.is_joined != joined:
                continue
            if bundle and num_bytes + saved.num_bytes > BUNDLE_BYTES:
                yield bundle
                bundle, num_bytes = [], 0
            bundle.append(saved)
            num_bytes += saved.num_bytes
        if bundle:
            yield bundle


def _write_bundle(prefix: str, tensors: Sequence[TensorWrite]) -> None:
    with tf.device("CPU:0"):
        names, slices, values = [], [], []
        for saved in tensors:
            shard = saved.read()
            for box in saved.slices:
                names.append(saved.name)
                slices.append(box.slice_spec(saved.shape))
                values.append(_take(shard, box))
        tf.raw_ops.SaveV2(
            prefix=prefix, tensor_names=names, shape_and_slices=slices, tensors=values
        )
    for path in glob.glob(f"{glob.escape(prefix)}.data-*"):
        folders.sync(path)


def _take(shard: tf.Tensor, box: Box) -> tf.Tensor:
    if tuple(shard.shape) == box.size:
        return shard
    if 0 in box.size:  # a shard of an empty tensor may be shorter than its one box
        return tf.zeros(box.size, shard.dtype)
    return tf.slice(shard, box.local_begin, box.size)


# --- one rank ------------------------------------------------------------------------


def missing_parts(folder: str, num_parts: int) -> list[int]:
    """The ranks whose part is not in the temporary folder yet, as this process sees it."""
    try:
        there = set(os.listdir(os.path.join(folder, "parts")))
    except OSError:
        there = set()
    return [r for r in range(num_parts) if os.path.basename(_part_path(folder, r)) not in there]


def commit(folder: str, num_parts: int, info: Mapping[str, Any]) -> str:
    """Make the parts of all ranks one checkpoint, and make it visible.

    Called by one rank after every rank has written its part. A crash at any point leaves the
    checkpoints that were there before and a temporary folder, which the next commit
    of another run deletes.

    Args:
        folder: the temporary folder.
        num_parts: number of ranks that wrote.
        info: anything that JSON holds (epoch, mesh, plan, position in the data); `Reader.info`.

    Returns:
        The checkpoint's path: `step-00000120` beside the temporary folder, or
        `step-00000120.1` if that step had been saved before.

    Raises:
        TfparError: a rank's part is missing, parts do not make up whole tensors, or a file
            cannot be written.
    """
    entries = [entry for rank in range(num_parts) for entry in _read_part(folder, rank)]
    _check(folder, entries)
    try:
        _merge(folder, entries)
        _describe(folder, {entry.name for entry in entries}, info)
        return folders.publish(folder)
    except (OSError, tf.errors.OpError) as error:
        raise TfparError(f"The checkpoint {folder} could not be completed: {error}") from error


def _merge(folder: str, entries: Sequence[Entry]) -> None:
    """Make the files of all parts those of one TensorFlow checkpoint."""
    for path in glob.glob(os.path.join(glob.escape(folder), f"{folders.TENSORS}.*")):
        os.remove(path)  # of an attempt that failed
    parts = os.path.join(folder, "parts")
    joined = _write_bundles(os.path.join(parts, "joined"), _joined(parts, entries))
    merged = [e for e in entries if e.boxes and not e.joined] + joined
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=sorted({os.path.join(parts, e.bundle) for e in merged}),
        destination_prefix=os.path.join(folder, folders.TENSORS),
        delete_old_dirs=False,
    )
    shutil.rmtree(parts)


def _check(folder: str, entries: Sequence[Entry]) -> None:
    """Check that each tensor is there once, without gaps or overlaps, which TensorFlow accepts."""
    if not entries:
        raise TfparError(f"No rank wrote a tensor to the checkpoint {folder}; nothing is saved.")
    by_name = defaultdict(list)
    for entry in entries:
        by_name[entry.name].append(entry)
    for name, found in by_name.items():
        kinds = sorted({f"{e.dtype}{list(e.shape)}" for e in found})
        if len(kinds) > 1:
            raise TfparError(
                f"Ranks wrote {name!r} as different tensors, {' and '.join(kinds)}, to the "
                f"checkpoint {folder}. Do all ranks build the same model?"
            )
        if not covers([box for entry in found for box in entry.boxes], found[0].shape):
            raise TfparError(
                f"The boxes of {name!r} in {_bundles_of(found)} do not "
                f"make up one tensor {kinds[0]} in the checkpoint {folder}. Every rank has to pass "
                f"the boxes of the same mesh and spec, and one rank of each group of "
                f"`choose_writers`."
            )


def _bundles_of(entries: Sequence[Entry]) -> str:
    return ", ".join(sorted(e.bundle for e in entries if e.boxes)) or "no file"


def _joined(parts: str, entries: Sequence[Entry]) -> list[TensorWrite]:
    """The tensors of which TensorFlow reads no other slices than those written, to be written
    whole: read from disk one after another, never all at once."""
    by_name = defaultdict(list)
    for entry in entries:
        if entry.joined:
            by_name[entry.name].append(entry)
    tensors = []
    for name, found in by_name.items():
        shape, dtype = found[0].shape, tf.as_dtype(found[0].dtype)
        read = functools.partial(_read_joined, parts, found)
        tensors.append(TensorWrite(name, shape, dtype, [Box.whole(shape)], read))
    return tensors


def _read_joined(parts: str, entries: Sequence[Entry]) -> tf.Tensor:
    shape, dtype = entries[0].shape, tf.as_dtype(entries[0].dtype)
    whole = np.empty(shape, dtype.as_numpy_dtype)
    for entry in entries:
        for begin, size in entry.boxes:
            (value,) = tf.raw_ops.RestoreV2(
                prefix=os.path.join(parts, entry.bundle),
                tensor_names=[entry.name],
                shape_and_slices=[Box(begin, size, begin).slice_spec(shape)],
                dtypes=[dtype],
            )
            whole[tuple(slice(b, b + s) for b, s in zip(begin, size, strict=True))] = value.numpy()
    return tf.constant(whole)


def _describe(folder: str, names: set[str], info: Mapping[str, Any]) -> None:
    files = sorted(os.listdir(folder))
    for name in files:
        folders.sync(os.path.join(folder, name))
    index = Index(
        FORMAT_VERSION,
        tfpar.__version__,
        folders.step_of(folder),
        dict(info),
        {name: os.path.getsize(os.path.join(folder, name)) for name in files},
        tuple(sorted(names)),
    )
    write_sealed(os.path.join(folder, folders.DESCRIPTION), index)


# --- files ---------------------------------------------------------------------------


def _part_path(folder: str, rank: int) -> str:
    return os.path.join(folder, "parts", f"part-{rank:05d}.json")


def _read_part(folder: str, rank: int) -> tuple[Entry, ...]:
    try:
        entries = read_part(_part_path(folder, rank)).entries
    except UnreadableError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise TfparError(
                f"The checkpoint {folder} lacks the part of rank {rank}. Commit after all ranks "
                f"have written theirs, to a folder on a file system that all of them share."
            ) from None
        raise TfparError(
            f"What rank {rank} says of its part of the checkpoint {folder} cannot be read: "
            f"{error}. Nothing is saved. Does something else write to this folder?"
        ) from error
    for entry in entries:
        if not entry.is_inside:
            raise TfparError(
                f"Rank {rank} wrote boxes of {entry.name!r} to the checkpoint {folder} that lie "
                f"outside its shape {entry.shape}. Every rank has to pass boxes of that shape."
            )
    return entries
