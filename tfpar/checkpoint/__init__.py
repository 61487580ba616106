"""Sharded checkpoints: logical tensors in TensorFlow's format, written and read by every rank.

Nothing is gathered, and nothing depends on the mesh that wrote it. Free of processes and of
Keras: functions of mesh, spec and rank; the caller says who writes when, and waits for whom.
"""

from tfpar.checkpoint.background_writer import BackgroundWriter
from tfpar.checkpoint.boxes import Box, choose_writers, list_boxes
from tfpar.checkpoint.draft import Draft
from tfpar.checkpoint.files import TensorWrite, commit, write_part
from tfpar.checkpoint.folders import checkpoints, discard, latest, prune, temporary_folder
from tfpar.checkpoint.lock import FolderLock
from tfpar.checkpoint.reader import Reader

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
