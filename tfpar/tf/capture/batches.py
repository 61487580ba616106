"""Batch sizes and specs of a step's arguments, and keys by which calls share a trace."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_SPECS = (tf.TensorSpec, tf.SparseTensorSpec)


def batch_size_of(arguments: Any) -> int | None:
    """The leading dim of the first argument that has one."""
    for leaf in tf.nest.flatten(arguments):
        if isinstance(leaf, _SPECS) and leaf.shape.rank:
            return leaf.shape[0]
    return None


def global_specs(specs: Any, parts: int) -> Any:
    """Specs of a global batch, from those of one of its `parts`."""
    size = batch_size_of(specs)

    def whole(spec: Any) -> Any:
        batched = isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] == size
        if not batched or size is None:
            return spec
        return tf.TensorSpec([size * parts, *spec.shape[1:]], spec.dtype)

    return tf.nest.map_structure(whole, specs)


def hashable(specs: Any) -> Any:
    """Return a key that is equal for arguments that one trace of a step serves."""
    flat = tf.nest.flatten(specs)
    structure = str(tf.nest.map_structure(lambda _: 0, specs))
    return structure, tuple(
        (type(s), tuple(s.shape.as_list()), s.dtype) if isinstance(s, _SPECS) else s for s in flat
    )
