"""Heartbeat: a file that a rank touches as it gets further, for the probes of a container."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from tfpar.jobs.launch import environment as names
from tfpar.spec.errors import TfparError


class Heartbeat:
    """File that is there once a rank has taken a step, and as old as its last progress.

    Its absence says that a rank is still starting, which takes minutes: it searches a plan, and
    compiles. Ranks may share a file: those that wait for one that hangs get no further either.

    Args:
        path: of the file; one that another run has left is removed.

    Raises:
        TfparError: there can be no such file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.unlink(missing_ok=True)
            path.touch()
            path.unlink(missing_ok=True)
        except OSError as error:
            raise TfparError(
                f"{names.HEARTBEAT}={path} cannot be written: {error.strerror}. Name a file in a "
                f"folder that is there."
            ) from error

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Heartbeat | None:
        """The one that `environ` asks for; None if it asks for none."""
        path = environ.get(names.HEARTBEAT)
        return cls(Path(path)) if path else None

    def beat(self) -> None:
        """Note progress; a disk that has become full ends no rank."""
        with contextlib.suppress(OSError):
            self._path.touch()
