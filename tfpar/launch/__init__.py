"""Ranks as processes: started on this and other machines, supervised, ended, and restarted.

`run` is the launcher's side, and `tfpar.launch.beacon` the rank's. Neither loads TensorFlow.
"""

from tfpar.launch.elastic import run
from tfpar.launch.options import RunOptions

__all__ = ["RunOptions", "run"]
