"""Commands that a check runs: with a time limit, whatever they start, and never raising."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from tfpar.jobs.launch.output import tells_nothing

_LAUNCHER = "tfpar run: "
_END_S = 15.0  # for a launcher to end its ranks


@dataclasses.dataclass(frozen=True, slots=True)
class CommandResult:
    """Outcome of a command: its exit code and output, or why it has no code.

    Attributes:
        code: for the shell, negative for a signal; None if it did not end in time or cannot be
            started.
        out, err: what it printed.
        why: what stands in place of a code.
    """

    code: int | None
    out: str
    err: str
    why: str = ""

    @property
    def reason(self) -> str:
        """One line that says why it failed: the launcher's own, or the last that was printed."""
        texts = (self.err.strip() or self.out).splitlines()
        lines = [line.strip() for line in texts if line.strip() and not tells_nothing(line)]
        told = [line for line in lines if line.startswith(_LAUNCHER)] or lines
        ended = self.why
        if self.code is not None and self.code < 0:
            ended = f"ended by signal {-self.code}"
        last = told[-1].removeprefix(_LAUNCHER) if told else ""
        return ": ".join(filter(None, [ended, last])) or f"exit code {self.code}"


def run(
    command: Sequence[str], limit_s: float, environ: Mapping[str, str] | None = None
) -> CommandResult:
    """Run `command` for at most `limit_s` seconds; neither it nor its group is left behind."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

        def printed() -> tuple[str, str]:
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
            return texts[0], texts[1]

        # Files, not pipes: a process that the command has left behind would hold those open.
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            return CommandResult(None, "", "", f"cannot be started: {error.strerror or error}")
        try:
            code: int | None = process.wait(limit_s)
            why = ""
        except subprocess.TimeoutExpired:
            code, why = None, f"not done after {limit_s:.0f} s"
        finally:
            _end(process)
        return CommandResult(code, *printed(), why)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()  # a launcher ends its ranks, which are in sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
