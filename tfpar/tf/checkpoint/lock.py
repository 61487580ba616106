"""The lock of a folder of checkpoints: one run at a time writes there.

    run/run.lock        {"host": "node7", "pid": 4711, "since": "2025-05-01 12:00:00", ...}

A run that ends deletes it, whether it ends well or not. One that is killed leaves it behind:

* On the same machine it counts as dead once its process has gone, and the next run takes the lock
  over at once. A process that was given the same number later is told by the time of its start.
* Of another machine, or another container, nobody sees the processes. So a run that lives renews
  its lock every `RENEWAL_S`, and another run watches it: as soon as it is renewed its owner lives;
  if it is not for `PATIENCE_S` its owner is dead. No clocks are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from typing import NamedTuple

from tfpar.readable import UnreadableError, convert, parse_json
from tfpar.spec import TfparError

logger = logging.getLogger("tfpar")

LOCK = "run.lock"

RENEWAL_S = 5.0
PATIENCE_S = 45.0
"""Much longer, since file systems may be slow to show a renewal, and a busy run to make one."""

_SETTLED_S = 0.2  # for another run that takes over the same lock at the same moment


@dataclasses.dataclass(frozen=True)
class Owner:
    """A run that holds a folder.

    Attributes:
        host: name of its machine.
        system: tells systems apart whose processes are counted alike: boots and containers.
        pid: its process; of several, the first rank's.
        started: when that process was started, as its system counts; empty where it does not say.
        since: when it took the lock, for people.
        token: drawn at random for each lock.
    """

    host: str
    system: str
    pid: int
    started: str
    since: str
    token: str

    @classmethod
    def of_this_process(cls) -> Owner:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        started = _start_of(os.getpid()) or ""
        return cls(
            socket.gethostname(), _system(), os.getpid(), started, since, secrets.token_hex(8)
        )

    def is_in(self, other: Owner) -> bool:
        """Whether both are one process."""
        return self._process == other._process

    def is_seen_from(self, other: Owner) -> bool:
        """Whether the processes of this one's system are those that the other sees."""
        return (self.host, self.system) == (other.host, other.system)

    @property
    def is_alive(self) -> bool:
        """Whether its process is there; for those that are seen from here."""
        return _start_of(self.pid) == self.started

    @property
    def _process(self) -> tuple[str, str, int, str]:
        return self.host, self.system, self.pid, self.started

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, since {self.since}"


class Renewal(NamedTuple):
    """A lock as it was written, and when it was renewed, by the clock of its file system."""

    text: str
    at_ns: int

    @property
    def owner(self) -> Owner | None:
        """Owner that the lock names; None where it does not say (yet)."""
        try:
            return convert(parse_json(self.text), Owner, lax=True)
        except UnreadableError:
            return None


class FolderLock:
    """A folder of checkpoints, held by this process until it is released.

    Another lock of the same folder in this process takes it over: a `fit` that was given up may
    have left the one before.

    Args:
        folder: is made if it is not there.

    Raises:
        TfparError: another run holds it; names host and process. Or it cannot be written to.
    """

    def __init__(self, folder: str) -> None:
        self._path, self._folder = os.path.join(folder, LOCK), folder
        self._owner = Owner.of_this_process()
        self._released = threading.Event()
        try:
            os.makedirs(folder, exist_ok=True)
            while not self._take():
                pass
        except OSError as error:
            raise TfparError(
                f"The folder of checkpoints {folder} cannot be used: {error}"
            ) from error
        threading.Thread(target=self._renew, name="tfpar-lock", daemon=True).start()

    def check(self) -> None:
        """Raise TfparError if another run has taken the lock over."""
        holder = _owner_in(self._path)
        if holder == self._owner:
            return
        if holder is None and self._create():
            logger.warning("Somebody deleted %s while this run held it; it is back.", self._path)
            return
        raise TfparError(
            f"The folder of checkpoints {self._folder} was taken over by "
            f"{holder or 'another run'}: this run writes nothing there any more, so that neither "
            f"deletes what the other saves. Give each run a folder of its own."
        )

    def release(self) -> None:
        """Let other runs have it; nothing where another one has it already."""
        self._released.set()
        if _owner_in(self._path) == self._owner:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path)

    def _take(self) -> bool:
        """Take the lock; False where another one came in between, so that all is to be seen anew.

        Raises:
            TfparError: another run holds it.
        """
        if self._create():
            return True
        before = _renewal_of(self._path)
        if before is None:  # released meanwhile
            return False
        holder = before.owner
        if holder is None or not holder.is_in(self._owner):
            if holder is not None and holder.is_seen_from(self._owner):
                lives: bool | None = holder.is_alive
                gone = "has ended"
            else:
                lives = self._is_renewed(before)
                gone = f"gave no sign of life for {PATIENCE_S:.0f} s"
            if lives is None:
                return False
            if lives:
                raise TfparError(
                    f"Another run writes its checkpoints to {self._folder}: {holder or 'unknown'}. "
                    f"Two runs would delete and resume from each other's. Give each a folder of "
                    f"its own, or end the other one."
                )
            logger.warning(
                "The folder of checkpoints %s was held by %s, which %s: this run takes it over.",
                self._folder,
                holder or "a run that did not say who it is",
                gone,
            )
        return self._replace(before.text)

    def _is_renewed(self, before: Renewal) -> bool | None:
        """Whether a run that cannot be seen from here renews its lock; None: it released it."""
        logger.warning(
            "The folder of checkpoints %s is held by %s. Waiting for up to %.0f s for a sign of "
            "its life.",
            self._folder,
            before.owner or "a run that does not say who it is",
            PATIENCE_S,
        )
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            time.sleep(RENEWAL_S / 10)
            now = _renewal_of(self._path)
            if now is None:
                return None
            if now != before:
                return True
        return False

    def _create(self) -> bool:
        """Make the lock where there is none."""
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self._owner), file)
        return True

    def _replace(self, before: str) -> bool:
        """Put this run's lock in the place of one whose content is `before`."""
        now = _renewal_of(self._path)
        if now is None or now.text != before:
            return False
        own = f"{self._path}.{self._owner.token}"
        with open(own, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self._owner), file)
        os.replace(own, self._path)
        time.sleep(_SETTLED_S)
        return _owner_in(self._path) == self._owner

    def _renew(self) -> None:
        while not self._released.wait(RENEWAL_S):
            if _owner_in(self._path) != self._owner:
                return
            with contextlib.suppress(OSError):
                os.utime(self._path)


def _owner_in(path: str) -> Owner | None:
    """The owner of a lock; None if there is no lock, or it is not (or not yet) one."""
    renewal = _renewal_of(path)
    return None if renewal is None else renewal.owner


def _renewal_of(path: str) -> Renewal | None:
    """Read a lock; None if there is none.

    Opening it makes network file systems look again when it changed.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return Renewal(file.read(), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None


def _system() -> str:
    """The boot and the container that this process is counted in; empty where that is unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """Return the start time of a process of this system; empty if unknown, None if it has gone."""
    if sys.platform.startswith("linux"):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()  # behind the program's name
        except OSError:
            return None
        state, started = fields[0], fields[19]
        return None if state in "ZX" else started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # somebody else's
    return ""
