"""Commands of a build: run with a time limit, all they print kept in one file."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfpar.spec.errors import TfparError

_TELLING = re.compile(r"\berror\b|fatal|killed|no such file|not found|cannot|could not", re.I)
# What pip, make and setuptools add once a command below them has failed.
_ECHO = re.compile(
    r"subprocess-exited-with-error|failed (building|to build)|this error originates|\*\*\* \[|"
    r"CalledProcessError|see above for output|exit code|exit status|build failed|"
    r"finished with status",
    re.I,
)
_NUM_LINES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class BuildLog:
    """Log of a build, whose commands run one by one until `deadline` (of `time.monotonic()`).

    Attributes:
        path: of the file.
        tell: reports progress: what is done, as each command begins.
    """

    path: Path
    deadline: float
    tell: Callable[[str], object] = lambda doing: None

    def run(
        self, command: Sequence[str], *, doing: str, environment: Mapping[str, str], mend: str
    ) -> None:
        """Run `command`; what it prints is added to the file.

        Raises:
            TfparError: it failed or took too long. The message begins with `doing`, quotes the
                lines that tell why, and ends with `mend`.
        """
        self.tell(doing)
        with self.path.open("a") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            begin = log.tell()
            # A session of its own: a compiler started by make must not outlive the time limit.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(max(0.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(process)
                raise TfparError(
                    f"{doing} took too long and was stopped; log: {self.path}. Give it more with "
                    f"--time-limit SECONDS, or look for what it waits for."
                ) from None
            except BaseException:
                _kill(process)
                raise
        if code:
            lines = " | ".join(self._telling(begin))
            raise TfparError(f"{doing} failed: {lines} (whole log: {self.path}). {mend}")

    def _telling(self, begin: int) -> list[str]:
        """The last lines, from byte `begin` on, that name an error; the last ones if none does."""
        text = self.path.read_bytes()[begin:].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if _TELLING.search(line) and not _ECHO.search(line)]
        return [line[:300] for line in (telling or lines)[-_NUM_LINES:]]


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
