"""Pausing of Python's garbage collection while graphs are made in bulk."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Without garbage collection.

    Next to nothing of a graph in the making is garbage, and each pass walks over all of it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
