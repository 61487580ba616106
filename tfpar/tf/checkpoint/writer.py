"""Writing of a checkpoint by this process: at once, or by a thread of its own.

The thread takes part in no collective: these would meet those of training in another order on
each rank. The one that commits sees in the folder which parts are there. So a checkpoint becomes
complete as soon as all ranks have written theirs, even if training has failed by then.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfpar.spec import TfparError
from tfpar.tf.checkpoint.files import TensorWrite, commit, missing_parts, write_part
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


logger = logging.getLogger("tfpar")

LIMIT_S = 1800.0
"""Seconds that are waited for the thread: longer than any disk takes that is to be waited for."""

_PARTS_S = 5.0  # for the parts of others, once training has failed here: they may have been killed
_POLL_S = 0.05


class BackgroundWriter:
    """A checkpoint that is written from now on.

    `write` and `commit` wait for what `Draft.write` and `Draft.commit` do.

    Args:
        draft: values are those of this moment, of which it takes copies in host memory.
        leads: whether this process commits, once the parts of all are there.
    """

    def __init__(self, draft: Draft, leads: bool) -> None:
        self._draft = draft.held()
        self._leads = leads
        self._written: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._path: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._patient_until = float("inf")
        self._go = threading.Event()  # there is nothing to wait for any more
        self._dropped = False
        self._thread = threading.Thread(target=self._run, name="tfpar-checkpoint", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Wait until this process's parts are written.

        Raises:
            TfparError: they cannot be written, or are not within `LIMIT_S`.
        """
        try:
            self._written.result(LIMIT_S)
        except concurrent.futures.TimeoutError:
            raise self._late() from None

    def commit(self) -> str:
        """Wait until it is a checkpoint; called once all parts are there. Returns its path.

        Raises:
            TfparError: a file cannot be written, or is not within `LIMIT_S`.
        """
        self._go.set()
        self._join()
        return self._path.result() if self._path.done() else self._draft.commit()

    def leave(self) -> None:
        """Wait for the thread where others may never come; what went wrong is in the log.

        Those parts of others that are not there after some seconds are not waited for.
        """
        concurrent.futures.wait([self._written], LIMIT_S)
        self._patient_until = time.monotonic() + _PARTS_S
        self._thread.join(LIMIT_S)

    def discard(self) -> None:
        """Leave nothing of it behind, unless all parts are there: then it becomes a checkpoint.

        Raises:
            TfparError: the thread does not end within `LIMIT_S`.
        """
        self._dropped = True
        self._go.set()
        self._join()
        self._draft.discard()

    def _join(self) -> None:
        self._thread.join(LIMIT_S)
        if self._thread.is_alive():
            raise self._late()

    def _late(self) -> TfparError:
        return TfparError(
            f"The checkpoint {self._draft.temporary} is still being written after {LIMIT_S:.0f} s. "
            f"Does its file system answer?"
        )

    # --- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._draft.write()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._failed(error, self._written)
            return
        self._written.set_result(None)
        try:
            if self._leads and self._all_there():
                self._path.set_result(self._draft.commit())
        except BaseException as error:  # noqa: BLE001 - as above
            self._failed(error, self._path)

    def _failed(self, error: BaseException, outcome: concurrent.futures.Future[Any]) -> None:
        logger.error("%s Training hears of it at the next checkpoint, or at its end.", error)
        outcome.set_exception(error)

    def _all_there(self) -> bool:
        """Wait for the parts of all ranks; False once that is in vain."""
        begin = time.monotonic()
        while missing := self._missing():
            if self._go.wait(_POLL_S):
                # Else all have written theirs, which some file systems are slow to show.
                return not (self._dropped and self._missing())
            if time.monotonic() > min(self._patient_until, begin + LIMIT_S):
                logger.warning(
                    "The checkpoint %s lacks the parts of %s and stays incomplete for now.",
                    self._draft.temporary,
                    ", ".join(f"rank {rank}" for rank in missing),
                )
                return False
        return True

    def _missing(self) -> list[int]:
        return missing_parts(self._draft.temporary, self._draft.num_parts)
