"""Ranks as processes: started on this and other machines, supervised, ended, and restarted.

`run` is the launcher's side, and `tfpar.jobs.launch.beacon` the rank's. Neither loads TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpar.jobs.launch.elastic import run
from tfpar.jobs.launch.options import RunOptions
from tfpar.lazy import lazy_exports

if TYPE_CHECKING:
    from tfpar.jobs.launch.beacon import TaskProgress
    from tfpar.jobs.launch.host_network import free_ports

__all__ = [
    "RunOptions",
    "TaskProgress",
    "free_ports",
    "run",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "tfpar.jobs.launch.beacon": ["TaskProgress"],
        "tfpar.jobs.launch.host_network": ["free_ports"],
    },
)
