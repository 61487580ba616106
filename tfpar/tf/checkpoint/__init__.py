"""Sharded checkpoints: logical tensors in TensorFlow's format, written and read by every rank.

Nothing is gathered, and nothing depends on the mesh that wrote it. Free of processes and of
Keras: functions of mesh, spec and rank; the caller says who writes when, and waits for whom.
"""

from tfpar.tf.checkpoint.boxes import Box, choose_writers, list_boxes
from tfpar.tf.checkpoint.files import TensorWrite, commit, write_part
from tfpar.tf.checkpoint.folders import checkpoints, discard, latest, prune, temporary_folder
from tfpar.tf.checkpoint.lock import FolderLock
from tfpar.tf.checkpoint.reader import Reader
from tfpar.tf.checkpoint.writer import BackgroundWriter, Draft

__all__ = [
    "BackgroundWriter",
    "Box",
    "Draft",
    "FolderLock",
    "Reader",
    "TensorWrite",
    "list_boxes",
    "checkpoints",
    "commit",
    "discard",
    "latest",
    "prune",
    "temporary_folder",
    "write_part",
    "choose_writers",
]
