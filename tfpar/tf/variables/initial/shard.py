"""The shard of an initial value that a rank stores, without the whole value in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from tfpar.spec import Mesh, Spec, SpecError
from tfpar.tf.variables.initial.blocks import BlockProgram, block_program
from tfpar.tf.variables.initial.shard_map import RowCopy, ShardMap
from tfpar.tf.variables.initial.shard_source import StoredValue

LIMIT_BYTES = 8 << 20
"""What may be in memory beside the shard; larger blocks are not made faster (empirical)."""


@runtime_checkable
class ShardSource(Protocol):
    """Value in a file, of which any shard can be read; called, it gives the whole."""

    shape: tuple[int, ...]

    def __call__(self) -> Any: ...

    def read_shard(self, spec: Spec, mesh: Mesh, rank: int) -> Any:
        """The shard that `rank` stores."""


def shard_value(
    initial: Callable[[], Any],
    shape: Sequence[int],
    dtype: Any,
    spec: Spec,
    mesh: Mesh,
    rank: int,
    *,
    limit_bytes: int = LIMIT_BYTES,
) -> tf.Tensor:
    """The shard of `initial()`, cast to `dtype`, that `rank` stores: to the bit that of the whole.

    See `shard_values`.
    """
    (shard,) = shard_values(initial, shape, dtype, spec, mesh, [rank], limit_bytes=limit_bytes)
    return shard


def shard_values(
    initial: Callable[[], Any],
    shape: Sequence[int],
    dtype: Any,
    spec: Spec,
    mesh: Mesh,
    ranks: Sequence[int],
    *,
    limit_bytes: int = LIMIT_BYTES,
) -> list[tf.Tensor]:
    """The shards of `initial()` that several ranks of this process store.

    A value of more than `limit_bytes` is made in blocks of at most as many bytes, each cut as the
    shards need it; a few blocks are in memory at a time. One row of the leading dimension is the
    least block where `initial` is not made entry by entry. What cannot be made in blocks (see
    `block_program`) is made whole, by one call: a generator with a state moves on as it would on
    one device. Runs on the CPU.

    Args:
        initial: makes the value: a callable without arguments, or a `ShardSource`.
        shape, dtype: of the whole value.
        limit_bytes: memory beside the shards, roughly.

    Raises:
        SpecError: `initial` makes another shape.
    """
    shape, dtype = tuple(shape), tf.as_dtype(dtype)
    with tf.init_scope(), tf.device("CPU:0"):
        held = [ShardMap(shape, spec, mesh, rank) for rank in ranks]
        if isinstance(initial, StoredValue):
            return [_read(initial.as_dtype(dtype.as_numpy_dtype), h, limit_bytes) for h in held]
        if isinstance(initial, ShardSource):
            return [tf.cast(initial.read_shard(spec, mesh, rank), dtype) for rank in ranks]
        if math.prod(shape) * dtype.size > limit_bytes:
            program = block_program(initial, shape, dtype, limit_bytes)
            if program is not None:
                return _from_blocks(program, held, dtype)
        value = _whole(initial, shape, dtype)
        return [_cut(value, h) for h in held]


def _read(stored: StoredValue, held: ShardMap, limit_bytes: int) -> tf.Tensor:
    if stored.shape != held.shape:
        raise _mismatch(stored.shape, held.shape)
    shard, array = _new(held.local_shape, tf.as_dtype(stored.dtype))
    stored.read_into(array, held, limit_bytes)
    return shard


def _whole(initial: Callable[[], Any], shape: tuple[int, ...], dtype: tf.DType) -> tf.Tensor:
    value = tf.cast(initial(), dtype)
    if value.shape != shape:
        raise _mismatch(tuple(value.shape), shape)
    return value


def _mismatch(made: tuple[int, ...], shape: tuple[int, ...]) -> SpecError:
    return SpecError(
        f"An initial value has shape {made}; its variable has {shape}. Give the variable an "
        f"initializer that makes its shape."
    )


def _cut(value: tf.Tensor, held: ShardMap) -> tf.Tensor:
    """The shard of a value that is there."""
    if held.is_whole:
        return value
    shard, array = _new(held.local_shape, value.dtype)
    _copy_rows(array, value, 0, 0, held.copies(0, 0, held.shape[0]), held)
    return shard


def _from_blocks(
    program: BlockProgram, held: Sequence[ShardMap], dtype: tf.DType
) -> list[tf.Tensor]:
    made = [_new(h.local_shape, dtype) for h in held]
    for index in range(program.num_blocks):
        start = index * program.block_rows
        stop = min(start + program.block_rows, program.rows)
        copies = [h.copies(program.dim, start, stop) for h in held]
        if any(copies):
            block = program.block(index)
            for (_, array), h, rows in zip(made, held, copies, strict=True):
                _copy_rows(array, block, program.dim, start, rows, h)
    return [shard for shard, _ in made]


def _copy_rows(
    target: np.ndarray,
    block: tf.Tensor,
    dim: int,
    start: int,
    copies: Sequence[RowCopy],
    held: ShardMap,
) -> None:
    """Do `copies` from `block`, which holds the rows from `start` on."""
    source = block._numpy_internal()
    box = held.spans(dim)
    for copy in copies:
        number = np.ravel_multi_index(copy.prefix, held.shape[:dim]) if dim else 0
        before = int(number) * held.shape[dim] - start
        at = (slice(before + copy.rows.start, before + copy.rows.stop), *box)
        target[copy.target] = held.take(source[at], dim)


def _new(shape: tuple[int, ...], dtype: tf.DType) -> tuple[tf.Tensor, np.ndarray]:
    """A tensor to be filled, and the array that writes to its memory.

    TensorFlow's own memory: a variable takes it over and updates it in place, where an array
    given to TensorFlow would be copied.
    """
    tensor = tf.raw_ops.Empty(shape=tf.constant(shape, tf.int32), dtype=dtype, init=False)
    return tensor, tensor._numpy_internal()
