"""The mark of datasets that give parts of global batches (see `data.shard_data`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_MARK = "_tfpar_parts"


def mark_parts(dataset: tf.data.Dataset, count: int) -> None:
    """Mark a dataset that gives one of `count` parts of each global batch."""
    setattr(dataset, _MARK, count)


def parts_of(iterator: Iterator[Any]) -> int:
    """Count the parts of a global batch, of which `iterator` gives one; 1 if it gives the whole."""
    todo = [getattr(iterator, "_dataset", None)]
    while todo:
        dataset = todo.pop()
        if isinstance(dataset, tf.data.Dataset):
            if hasattr(dataset, _MARK):
                return int(getattr(dataset, _MARK))
            todo += dataset._inputs()
    return 1
