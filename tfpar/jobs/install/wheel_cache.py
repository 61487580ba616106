"""Wheels built before, on disk: `<cache>/wheels/<key>/horovod-*.whl`, one folder for each key.

A wheel is moved into its folder whole, so that whoever finds one may use it; who builds holds the
folder's lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tfpar.spec.errors import TfparError

_POLL_S = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class WheelKey:
    """Key of a wheel: versions, the interpreter's tag and platform, and build options."""

    horovod: str
    patch: str
    tensorflow: str
    python: str
    platform: str
    mpi: bool
    nccl: bool

    def __str__(self) -> str:
        backends = "gloo" + "-mpi" * self.mpi + "-nccl" * self.nccl
        return (
            f"horovod-{self.horovod}-{self.patch}-tf{self.tensorflow}-{self.python}-"
            f"{self.platform}-{backends}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class WheelFolder:
    """The folder of one key's wheel, its build log and its lock."""

    path: Path

    @classmethod
    def make(cls, cache: Path, key: WheelKey) -> WheelFolder:
        """The folder of `key` below `cache`.

        Raises:
            TfparError: it cannot be written.
        """
        path = cache / "wheels" / str(key)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TfparError(
                f"Cannot make the folder {path} for wheels: {error.strerror}. Set TFPAR_CACHE to "
                f"a folder that can be written."
            ) from error
        return cls(path)

    @property
    def log(self) -> Path:
        """Path of the last build's output."""
        return self.path / "build.log"

    def wheel(self) -> Path | None:
        """The wheel, or None if none has been built."""
        return next(iter(sorted(self.path.glob("*.whl"))), None)

    def put(self, wheel: Path) -> Path:
        """Keep a copy of `wheel` in place of what was there; returns its path."""
        others = set(self.path.glob("*.whl"))
        kept = self.path / wheel.name
        copy = self.path / f".{wheel.name}.{os.getpid()}"
        try:
            shutil.copyfile(wheel, copy)
            os.replace(copy, kept)
        finally:
            copy.unlink(missing_ok=True)
        for other in others - {kept}:
            other.unlink()
        return kept

    @contextlib.contextmanager
    def locked(self, limit_s: float) -> Iterator[None]:
        """Hold the folder alone; the lock of a process that died is free.

        Raises:
            TfparError: another process has held it for `limit_s` seconds.
        """
        path = self.path / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            deadline = time.monotonic() + limit_s
            while not _taken(descriptor):
                if time.monotonic() > deadline:
                    holder = os.pread(descriptor, 32, 0).decode() or "unknown"
                    raise TfparError(
                        f"Another process (pid {holder}) has been building this wheel for more "
                        f"than {limit_s:.0f} s; it holds {path}. Wait for it or end it."
                    )
                time.sleep(_POLL_S)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(descriptor)  # frees the lock


def default_cache() -> Path:
    """$TFPAR_CACHE, or ~/.cache/tfpar."""
    return Path(os.environ.get("TFPAR_CACHE") or "~/.cache/tfpar").expanduser().absolute()


def _taken(descriptor: int) -> bool:
    import fcntl  # not on Windows, where `tfpar --help` has to work all the same

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
