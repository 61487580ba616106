"""Draft of a checkpoint: the parts that this process writes, and the commit that completes it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from tfpar.tf.checkpoint.files import TensorWrite, commit, write_part
from tfpar.tf.checkpoint.folders import discard, prune


@dataclasses.dataclass(frozen=True)
class Draft:
    """Checkpoint that is being written: the part that this process contributes.

    Attributes:
        temporary: its folder until it is committed, from `folders.temporary_folder`.
        parts: what each rank of this process writes; empty once it is written.
        num_parts: ranks in all, of this process and others.
        info: see `files.commit`.
        keep: how many checkpoints there are to be at most, this one included.
    """

    temporary: str
    parts: dict[int, list[TensorWrite]]
    num_parts: int
    info: Mapping[str, Any]
    keep: int

    def held(self) -> Draft:
        """The same with the values of this moment, in host memory, whatever happens to them."""
        parts = {rank: [saved.held() for saved in part] for rank, part in self.parts.items()}
        return dataclasses.replace(self, parts=parts)

    def write(self) -> None:
        """Write this process's parts, and let go of their values; TfparError as `write_part`."""
        try:
            for rank, part in self.parts.items():
                write_part(self.temporary, rank, part)
        finally:
            self.parts.clear()

    def commit(self) -> str:
        """Make the parts a checkpoint, once all are there; returns its path.

        Raises:
            TfparError: a part is missing, or a file cannot be written.
        """
        path = commit(self.temporary, self.num_parts, self.info)
        prune(os.path.dirname(path), self.keep)
        return path

    def discard(self) -> None:
        """Leave nothing of it behind."""
        discard(self.temporary)
