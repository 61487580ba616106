"""Progress of long searches on a terminal; quiet otherwise."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console

_QUIET_S = 2.0
_EVERY_S = 0.2


@contextlib.contextmanager
def searching() -> Iterator[Callable[[str, int], None] | None]:
    """Shows what is being searched once a search takes long; None where no one would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    console = Console(stderr=True)
    status = console.status("searching a plan")
    started = shown = time.monotonic()
    running = False

    def tell(what: str, candidates: int) -> None:
        nonlocal shown, running
        now = time.monotonic()
        if now - started < _QUIET_S or now - shown < _EVERY_S:
            return
        shown = now
        if not running:
            running = True
            status.start()
        status.update(f"searching a plan: {candidates} priced, {now - started:.0f} s, {what}")

    try:
        yield tell
    finally:
        if running:
            status.stop()
