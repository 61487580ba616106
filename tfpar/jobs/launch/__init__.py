"""Ranks as processes: started on this and other machines, supervised, ended, and restarted.

`run` is the launcher's side, and `tfpar.jobs.launch.beacon` the rank's. Neither loads TensorFlow.
"""

from tfpar.jobs.launch.elastic import run
from tfpar.jobs.launch.options import RunOptions

__all__ = ["RunOptions", "run"]
