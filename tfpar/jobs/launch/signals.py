"""Signals to the launcher, noted instead of ending it, so that its ranks end first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[signal.Signals]]:
    """The list grows with each signal that comes; in another thread than the first none comes."""
    caught: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, _frame: object) -> None:
        caught.append(signal.Signals(number))

    # What is ignored stays so: `nohup`, or a shell's background job.
    before = {s: h for s in _CAUGHT if (h := signal.getsignal(s)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
