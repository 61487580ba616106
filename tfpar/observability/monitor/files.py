"""Files of a monitor: lines of JSON, and scalars for TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpar.spec import TfparError

logger = logging.getLogger("tfpar")

LINES = "monitor.jsonl"


class MonitorWriter:
    """The files of one training, in one folder, which is made if need be.

    Lines are added to those that are there: one object each, whole, and on disk at once. Scalars
    are written where the package `tensorboard` is installed. A file that cannot be written later
    on ends the writing, with a warning, and not the training.

    Raises:
        TfparError: the folder cannot be written to.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, LINES)
        self._writes = True
        try:
            os.makedirs(folder, exist_ok=True)
            with open(self.path, "a", encoding="utf-8"):
                pass
        except OSError as error:
            raise TfparError(
                f"tap.Monitor cannot write to {self.path!r}: {error.strerror}. Name another "
                f"folder, or folder=None to write no files."
            ) from error
        self._scalars: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            self._scalars = tf.summary.create_file_writer(folder)

    def add(self, step: int, epoch: int, found: Mapping[str, Any]) -> None:
        """Add a line, and scalars of its numbers.

        Args:
            step: training steps that the monitor has seen.
            epoch: from 0, as Keras counts.
        """
        line = {"time": time.time(), "epoch": epoch, "step": step, **found}
        if not self._writes:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(_plain(line)) + "\n")
            self._add_scalars(step, found)
        except (OSError, tf.errors.OpError) as error:
            self._writes = False
            logger.warning("tap.Monitor writes no more into %s: %s", self.path, error)

    def _add_scalars(self, step: int, found: Mapping[str, Any]) -> None:
        if self._scalars is None:
            return
        group = "monitor_epoch" if found.get("span") == "epoch" else "monitor"
        with self._scalars.as_default():
            for name, value in found.items():
                if isinstance(value, float) and math.isfinite(value):
                    tf.summary.scalar(f"{group}/{name}", value, step=step)
        self._scalars.flush()

    def close(self) -> None:
        """Close the files: nothing more is added."""
        if self._scalars is not None:
            self._scalars.close()


def _plain(value: Any) -> Any:
    """`value` as JSON has it: null for what is no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value
