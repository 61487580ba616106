"""A started process: its output pumped, its end noted to the moment, and its whole group ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from tfpar.jobs.launch.output import LineSplitter, Output, tells_nothing

_TAIL_LINES = 40
_CHUNK = 1 << 16
_PUMPS_S = 2.0  # a process that left the group may hold the streams open
_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class Exit:
    """End of a process: `code` below 0 is a signal; `at` is `time.monotonic()`."""

    code: int
    at: float


class Process:
    """A command in a process group of its own, steered over its stdin (see `command.py`).

    Args:
        argv: made by `local_command` or `ssh_command`.
        environment: all of it.
        label: in front of its lines, and in the names of its files; None passes lines as they are.
        first_line: the first thing on its stdin.
        news: set when the process has ended.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        output: Output,
        news: threading.Event,
        *,
        label: str | None,
        first_line: str | None = None,
    ) -> None:
        self.exit: Exit | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._output, self._label, self._news = output, label, news
        self._lifeline_lock = threading.Lock()
        self._process = subprocess.Popen(
            argv,
            env=dict(environment),
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if first_line is not None:
            self._say(first_line)
        streams = {"out": self._process.stdout, "err": self._process.stderr}
        self._pumps = [self._thread(self._pump, s, name) for name, s in streams.items()]
        self._waiter = self._thread(self._wait)

    @property
    def running(self) -> bool:
        return self.exit is None

    @property
    def stderr_tail(self) -> tuple[str, ...]:
        """The last lines that it wrote to stderr, but for those of TensorFlow's start."""
        return tuple(self._tail)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it has started; returns at once."""
        if self.running:
            self._say(number.name.removeprefix("SIG"))

    def kill(self) -> None:
        """End the group now; returns when it has ended, or after a few seconds."""
        self.send(signal.SIGKILL)
        self._waiter.join(_KILL_S / 5)  # over ssh the other side ends first
        if self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.finish()

    def finish(self) -> None:
        """Wait, a few seconds at most, until all is noted and printed."""
        self._waiter.join(_KILL_S)
        for pump in self._pumps:
            pump.join(_PUMPS_S)

    def _thread(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    def _wait(self) -> None:
        code = self._process.wait()
        at = time.monotonic()
        self._say("KILL")  # what it has left behind in its group
        with self._lifeline_lock, contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self.exit = Exit(code, at)
        self._news.set()

    def _say(self, line: str) -> None:
        with self._lifeline_lock, contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(os.fsencode(f"{line}\n"))
            self._process.stdin.flush()

    def _pump(self, stream: IO[bytes], name: str) -> None:
        lines = LineSplitter()
        with stream, self._output.file(self._label or "all", name) as copy:
            while data := os.read(stream.fileno(), _CHUNK):
                with contextlib.suppress(OSError):  # a full disk ends no rank
                    copy.write(data)
                self._print(name, lines.feed(data))
        self._print(name, lines.end())

    def _print(self, name: str, lines: list[str]) -> None:
        for line in lines:
            if name == "err" and not tells_nothing(line):
                self._tail.append(line)
            self._output.line(self._label, name, line)
