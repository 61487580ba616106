"""Output of ranks: lines labelled with their rank, and a file for each rank and stream."""

from __future__ import annotations

import os
import re
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, TextIO

from tfpar.spec.errors import TfparError

_LINE_END = re.compile(rb"\r\n|\n|\r")
_LONGEST = 1 << 16  # bytes of one line
_NUM_COLOURS = 6
_START_UP = re.compile(
    r"I0000 00:00:|[-0-9]{10} [:.0-9]+: I |WARNING: All log messages before absl::Init"
    r"|To enable the following instructions"
)


class LineSplitter:
    """Splitter of a stream of bytes at line feeds and carriage returns (progress bars)."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_return = False

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes, without their ends."""
        if self._after_return and data.startswith(b"\n"):
            data = data[1:]  # of a line end whose first byte came before
        if data:
            self._after_return = data.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + data)
        if len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        return [_text(line) for line in lines]

    def end(self) -> list[str]:
        """The last line, if its end is missing."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


class Output:
    """Writer of the lines of all ranks of one attempt.

    Raises:
        TfparError: the folder for the files cannot be made.
    """

    def __init__(self, folder: str | None, attempt: int) -> None:
        self._lock = threading.Lock()
        self._mode = "ab" if attempt else "wb"
        self._folder = Path(folder) if folder is not None else None
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise TfparError(
                    f"Cannot make the folder --output-dir {folder}: {error}."
                ) from error

    def file(self, label: str, stream: str) -> IO[bytes]:
        """Open for what the rank writes, as it is; the caller closes it."""
        path = os.devnull if self._folder is None else self._folder / f"rank.{label}.{stream}"
        return open(path, self._mode, buffering=0)

    def line(self, label: str | None, stream: str, text: str) -> None:
        """One line of a rank, to this process's stdout or stderr; ranks go on if that is closed."""
        to = sys.stdout if stream == "out" else sys.stderr
        with self._lock, suppress(OSError, ValueError):
            to.write(f"{_prefix(label, to)}{text}\n")
            to.flush()


def say(text: str) -> None:
    """One message of the launcher's own."""
    with suppress(OSError, ValueError):
        print(f"tfpar run: {text}", file=sys.stderr, flush=True)


def tells_nothing(line: str) -> bool:
    """Whether it is what TensorFlow writes at every start, which explains no failure."""
    return _START_UP.match(line) is not None


def _prefix(label: str | None, to: TextIO) -> str:
    if label is None:
        return ""
    if not to.isatty() or "NO_COLOR" in os.environ:
        return f"[{label}] "
    colour = 31 + int(label) % _NUM_COLOURS
    return f"\x1b[{colour}m[{label}]\x1b[0m "


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")
