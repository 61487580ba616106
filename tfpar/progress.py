"""Progress of long work: one line that terminals and notebooks keep up to date.

Elsewhere a line is written now and then.

Capturing, searching, compiling, calibrating and installing report here. Work that reports nothing
for long (a trace, a compiler) is shown too: a thread looks on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import importlib
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.status import Status

from tfpar.spec.quantities import format_seconds

logger = logging.getLogger("tfpar")


class Display(Protocol):
    """Display that shows lines to the user.

    Attributes:
        quiet_s: work that takes no longer is not worth a line.
        every_s: how far apart lines are.
    """

    quiet_s: float
    every_s: float

    def show(self, line: str) -> None:
        """Show a line in place of, or below, the one before."""

    def note(self, line: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Leave nothing unfinished: the work has ended."""


class Terminal:
    """Display of one line on stderr, which is updated in place."""

    quiet_s, every_s = 2.0, 0.2

    def __init__(self) -> None:
        self._status: Status | None = None

    def show(self, line: str) -> None:
        if self._status is None:
            self._status = Console(stderr=True).status(line)
            self._status.start()
        self._status.update(line)

    def note(self, line: str) -> None:
        # Above the line that is kept up to date, whose console is the one to print by.
        console = Console(stderr=True) if self._status is None else self._status.console
        console.print(f"tfpar: {line}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()


class Notebook:
    """Display of a bar and one line below a cell, which are updated in place."""

    quiet_s, every_s = 2.0, 1.0

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, line: str) -> None:
        # How much is left is not known: a bar that only moves.
        shown = {"text/plain": line, "text/html": f"<progress></progress> {html.escape(line)}"}
        if self._handle is None:
            ipython = importlib.import_module("IPython.display")  # it has no types
            self._handle = ipython.display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def note(self, line: str) -> None:
        print(f"tfpar: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": "", "text/html": ""}, raw=True)


class LogDisplay:
    """Display of lines on stderr, few enough for a log."""

    quiet_s, every_s = 10.0, 10.0

    def show(self, line: str) -> None:
        print(f"tfpar: {line}", file=sys.stderr, flush=True)

    note = show

    def close(self) -> None:
        pass


@dataclasses.dataclass
class _Part:
    """Attributes:
    best_s: the best step found within; None: it is reported to the part around."""

    what: str
    ends: float
    best_s: float | None = None
    detail: str = ""


class Reporter:
    """Reporter of long work: its parts from the outermost in, the best so far, time left.

    Args:
        title: of the work, such as "searching a plan".
        display: None: nothing is said.
    """

    def __init__(self, title: str = "", display: Display | None = None) -> None:
        self._title, self._display = title, display
        self._started = self._shown = time.monotonic()
        self._parts = [_Part("", math.inf, math.inf)]
        self._lock = threading.Lock()  # of what is shown: whoever works tells, and a thread

    @contextlib.contextmanager
    def at(self, what: str, limit_s: float | None = None, *, apart: bool = False) -> Iterator[None]:
        """Run a block as a part of the work around it.

        Args:
            limit_s: the seconds that it may take.
            apart: its best is not compared with what is found outside.
        """
        ends = math.inf if limit_s is None else time.monotonic() + limit_s
        self._parts.append(_Part(what, ends, math.inf if apart else None))
        self._show()
        try:
            yield
        finally:
            self._parts.pop()

    def tell(self, detail: str) -> None:
        """Report the current detail of the innermost part."""
        self._parts[-1].detail = detail
        self._show()

    def priced(self, what: str, candidates: int) -> None:
        """Report the number of candidates priced so far, as `planning.problem.Progress` does."""
        self.tell(f"{what}, {candidates} priced")

    def note(self, line: str) -> None:
        """Show a line that stays, at once: in the log where that shows such lines."""
        if not line or self._display is None:
            return
        if logger.isEnabledFor(logging.INFO):
            logger.info(line)
        else:
            self._display.note(line)

    def found(self, seconds: float) -> None:
        """Report a plan whose step takes so long; the best one is shown."""
        part = self._compared()
        part.best_s = min(part.best_s or math.inf, seconds)

    def _compared(self) -> _Part:
        """Return the innermost part that has a best step of its own."""
        return next(part for part in reversed(self._parts) if part.best_s is not None)

    def beat(self) -> None:
        """Show the time that has passed, where the work reports nothing."""
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if self._display is None or now - self._started < self._display.quiet_s:
            return
        with self._lock:
            if now - self._shown >= self._display.every_s:
                self._shown = now
                self._display.show(self._line(now))

    def _line(self, now: float) -> str:
        parts = list(self._parts)
        at = [text for part in parts for text in (part.what, part.detail) if text]
        best_s = self._compared().best_s
        if best_s is not None and best_s < math.inf:
            at.append(f"best step so far {format_seconds(best_s)}")
        at.append(f"{now - self._started:.0f} s")
        ends = min(part.ends for part in parts)
        if ends < math.inf:
            at.append(f"{max(0.0, ends - now):.0f} s left")
        return f"{self._title}: {', '.join(at)}"


QUIET = Reporter()
"""Says nothing."""


@contextlib.contextmanager
def reporting(title: str, wanted: bool = True) -> Iterator[Reporter]:
    """Make a reporter for a block: on a terminal or in a notebook, else a line every ten seconds.

    Args:
        wanted: whether anything is to be said, by this rank.
    """
    if not wanted:
        yield QUIET
        return
    display = _display()
    report, over = Reporter(title, display), threading.Event()

    def look_on() -> None:
        while not over.wait(BEAT_S):
            report.beat()

    thread = threading.Thread(target=look_on, name="tfpar progress", daemon=True)
    thread.start()
    try:
        yield report
    finally:
        over.set()
        thread.join()  # it shows nothing any more
        display.close()


BEAT_S = 0.5
"""How often it is looked whether there is something to show, in seconds."""


def _display() -> Display:
    """Return the display for where the user looks: a terminal, a notebook, or a log."""
    if sys.stderr.isatty():
        return Terminal()
    return Notebook() if _in_notebook() else LogDisplay()


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows what is displayed."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    return running is not None and type(running).__name__ == "ZMQInteractiveShell"
