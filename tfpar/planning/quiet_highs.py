"""HiGHS without its banner.

Since 1.16 HiGHS prints its name and a notice when a process makes its first solver, before a solver
can be told to be silent. So the first one is made here, with the standard output elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import tempfile
import threading
from typing import Any

_BANNER = b"Running HiGHS", b"Includes third-party"
"""Beginnings of its lines."""

_LOCK = threading.Lock()


def hush_highs() -> None:
    """Have HiGHS print its banner where nobody sees it; what else is printed meanwhile comes
    afterwards."""
    with _LOCK:  # the output is that of the whole process
        _make_first()


@functools.cache
def _make_first() -> None:
    import highspy

    make: Any = highspy.Highs  # its releases differ in what types they state
    if sys.stdout is not None:
        sys.stdout.flush()
    with tempfile.TemporaryFile() as said:
        try:
            shown = os.dup(1)
        except OSError:  # there is no output
            return
        os.dup2(said.fileno(), 1)
        try:
            make()
        finally:
            ctypes.CDLL(None).fflush(None)  # of C, which HiGHS may print by
            os.dup2(shown, 1)
            os.close(shown)
        said.seek(0)
        others = b"".join(line for line in said if not line.startswith(_BANNER))
    if others:
        os.write(1, others)
