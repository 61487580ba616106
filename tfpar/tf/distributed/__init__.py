"""Coordination of ranks that are processes: their place in the job, and messages between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.tf.distributed.job import Job
    from tfpar.tf.distributed.world import this_world

__all__ = [
    "Job",
    "this_world",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.tf.distributed.job": ["Job"],
        "tfpar.tf.distributed.world": ["this_world"],
    },
)
