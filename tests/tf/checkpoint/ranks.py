"""One process that plays all ranks, one after another."""

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.spec import Mesh, Replicate, Shard, Spec, local_shape
from tfpar.tf.checkpoint import (
    TensorWrite,
    choose_writers,
    commit,
    list_boxes,
    temporary_folder,
    write_part,
)
from tfpar.tf.variables.values import cut_shard

Tensors = Mapping[str, tuple[Any, Spec]]

MESHES = [Mesh.of(shape) for shape in [(1,), (2,), (4,), (2, 2), (3,)]]


def part(tensors: Tensors, mesh: Mesh, rank: int) -> list[TensorWrite]:
    """What `rank` writes of whole values laid out as they say."""
    values = {name: tf.convert_to_tensor(value) for name, (value, _) in tensors.items()}
    num_bytes = [v.dtype.size * int(tf.size(v)) for v in values.values()]
    writing = choose_writers(num_bytes, [spec for _, spec in tensors.values()], mesh)
    return [
        TensorWrite(
            name,
            tuple(values[name].shape),
            values[name].dtype,
            list_boxes(values[name].shape, spec, mesh, rank) if rank in ranks else [],
            functools.partial(shard_of, values[name], spec, mesh, rank),
        )
        for (name, (_, spec)), ranks in zip(tensors.items(), writing, strict=True)
    ]


def shard_of(value: Any, spec: Spec, mesh: Mesh, rank: int) -> tf.Tensor:
    """What `rank` stores of a whole value."""
    value = tf.convert_to_tensor(value)
    if 0 in value.shape:
        return tf.zeros(local_shape(value.shape, spec, mesh), value.dtype)
    return cut_shard(value, spec, mesh, rank)


def save(folder, tensors: Tensors, mesh: Mesh, step: int = 0, token: str = "test", **info) -> str:
    """Write and commit as all ranks; returns the checkpoint's path."""
    temporary = temporary_folder(str(folder), step, token)
    for rank in range(mesh.size):
        write_part(temporary, rank, part(tensors, mesh, rank))
    return commit(temporary, mesh.size, info)


def specs_of(shape: tuple[int, ...], mesh: Mesh) -> list[Spec]:
    """Every choice of a plain, a strided or no split for each axis of the mesh, where it fits."""
    kinds = [Replicate(), *map(Shard, range(len(shape)))]
    kinds += [Shard(d, n // 2) for d, n in enumerate(shape) if n and n % 2 == 0]
    found = []
    for spec in itertools.product(kinds, repeat=mesh.num_axes):
        dims = [p.dim for p in spec if isinstance(p, Shard)]
        if len(dims) == len(set(dims)):
            found.append(spec)
    return found


def same(a, b) -> bool:
    """Same type, shape and bits."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
