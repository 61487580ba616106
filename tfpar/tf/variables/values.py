"""Values of variables: cut into the shards that ranks store, joined again, and put behind
handles."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfpar.spec import Mesh, Replicate, Shard, Spec, local_indices, local_shape
from tfpar.tf.interop.variables import UninitializedVariable


def cut_shard(value: tf.Tensor, spec: Spec, mesh: Mesh, rank: int) -> tf.Tensor:
    """The shard of `value` that `rank` stores; padding repeats the last entry."""
    for dim in sorted({p.dim for p in spec if isinstance(p, Shard)}):
        length = value.shape[dim]
        at = local_indices(length, dim, spec, mesh, mesh.coordinates(rank))
        if (at[1:] - at[:-1] == 1).all() and (at >= 0).all():
            begin = [0] * len(value.shape)
            size = value.shape.as_list()
            begin[dim], size[dim] = int(at[0]), len(at)
            value = tf.slice(value, begin, size)
        else:
            at[at < 0] = length - 1
            value = tf.gather(value, at, axis=dim)
    return value


def join_shards(
    shards: Sequence[tf.Tensor], shape: Sequence[int], spec: Spec, mesh: Mesh
) -> tf.Tensor:
    """The whole value from the shard of every rank; inverse of `cut_shard`."""
    pieces = list(shards)
    for axis in reversed(range(mesh.num_axes)):
        parts, placement = mesh.shape[axis], spec[axis]
        groups = [pieces[i : i + parts] for i in range(0, len(pieces), parts)]
        if not isinstance(placement, Shard):
            pieces = [g[0] for g in groups]
            continue
        whole = list(
            local_shape(shape, (*spec[:axis], *[Replicate()] * (mesh.num_axes - axis)), mesh)
        )
        pieces = [_join_axis(g, placement, whole) for g in groups]
    return pieces[0]


def _join_axis(parts: Sequence[tf.Tensor], shard: Shard, shape: list[int]) -> tf.Tensor:
    outer, split, unit = shard.view(shape[shard.dim])
    head, tail = shape[: shard.dim], shape[shard.dim + 1 :]
    viewed = [tf.reshape(p, [*head, outer, -1, *tail]) for p in parts]
    joined = tf.concat(viewed, axis=shard.dim + 1)
    length = split * unit
    if joined.shape[shard.dim + 1] != length:
        size = [*head, outer, length, *tail]
        joined = tf.slice(joined, [0] * len(size), size)
    return tf.reshape(joined, shape)


# --- values behind handles ------------------------------------------------------------------


def plain_variable(value: tf.Tensor) -> tf.Variable:
    """An ordinary variable, past any creator scope that is active."""
    variable = UninitializedVariable(shape=value.shape, dtype=value.dtype, trainable=False)
    variable.assign(value)
    return variable


def store(variable: tf.Variable, value: tf.Tensor) -> None:
    """Put `value` behind the variable's handle, whatever shape is there now."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)


def release(variable: tf.Variable) -> None:
    """Let go of the memory behind the variable's handle, which stays.

    A function of the user's that was traced before would read it: it finds not-a-number.
    """
    dtype = variable.dtype
    is_number = dtype.is_floating or dtype.is_complex
    store(variable, tf.cast(float("nan"), dtype) if is_number else tf.zeros([0], dtype))
